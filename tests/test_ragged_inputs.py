"""`ragged` of single inputs: the sizes of one tower's batches travel, those of the other are promised to be equal."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import InputError, PlanError, autoshard, graph_diff
from tests.compare import Result, Setting, require_equal, train_case
from tests.models import Args, Model, ids
from tests.pool import Pool


class Towers(nn.Module):
    """history (N,), offsets (B,), item (B,) -> (B, 5): a history is as long as it is, an item is one."""

    def __init__(self) -> None:
        super().__init__()
        self.history = nn.ModuleDict({"table": nn.EmbeddingBag(13, 7, mode="mean"), "more": nn.EmbeddingBag(13, 7)})
        self.item = nn.ModuleDict({"table": nn.Embedding(11, 7), "layer": nn.Linear(7, 7)})
        self.head = nn.Linear(7, 5)

    def forward(self, history: Tensor, offsets: Tensor, item: Tensor) -> Tensor:
        past = self.history["table"](history, offsets) + self.history["more"](history, offsets)
        return self.head(past * torch.tanh(self.item["layer"](self.item["table"](item))))


def split(ranks: int, rows: int, seed: int) -> tuple[list[Args], Args]:
    """Every rank's batch, of as many rows but of another number of ids; and all of them as one."""
    parts: list[Args] = []
    for rank in range(ranks):
        draw = 100 * seed + rank
        lengths = ids(rows, draw, 4) + (rank == 0)
        parts.append((ids(int(lengths.sum()), draw + 1, 13), lengths.cumsum(0) - lengths, ids(rows, draw + 2, 11)))
    bases = torch.tensor([0, *(part[0].numel() for part in parts)]).cumsum(0)
    offsets = torch.cat([part[1] + base for part, base in zip(parts, bases[:-1], strict=True)])
    return parts, (torch.cat([part[0] for part in parts]), offsets, torch.cat([part[2] for part in parts]))


TOWERS = Model(Towers, split)


def train(mesh: DeviceMesh, setting: Setting) -> Result:
    return train_case(mesh, TOWERS, setting)


@pytest.mark.parametrize("ragged", [("history",), ["history.*"], {"history.more.weight", "*.table.weight"}, True])
def test_towers_with_and_without_ragged_inputs_train_as_in_one_process(pool: Pool, ragged: Any) -> None:
    require_equal(pool.run(train, Setting("towers", ragged=ragged), world_size=3, timeout=120))


@pytest.mark.slow
def test_towers_with_and_without_ragged_inputs_compile_to_one_graph(pool: Pool) -> None:
    setting = Setting("towers", ragged=("history",), backend="aot_eager")
    require_equal(pool.run(train, setting, world_size=2, fresh_dynamo=True, timeout=120))


def exchanges_of_sizes(mesh: DeviceMesh, ragged: Any, plan: Any) -> dict[str, int]:
    """How often the functions of either way stand in the graph of the model."""
    model = autoshard(TOWERS.make(), mesh, plan, ragged=ragged)
    after = "\n".join(graph_diff(model).regions[0].after)
    counts = {name: after.count(f" = {name}(") for name in ("exchange_counts", "all_gather_ragged", "all_gather_batch")}
    for together in re.findall(r" = all_gather_together\(\[(.*?)\]", after):
        counts["all_gather_batch"] += len(together.split(","))
    return counts


@pytest.mark.parametrize(
    ("ragged", "ragged_inputs", "equal_inputs"),
    [
        (False, 0, 5),
        (("history",), 1, 3),
        (["history.table"], 1, 5),
        (("item", "head.weight"), 3, 2),
        (True, 4, 0),
    ],
)
def test_sizes_of_ragged_inputs_alone_travel(pool: Pool, ragged: Any, ragged_inputs: int, equal_inputs: int) -> None:
    """Both tables of `history` take the same ids and offsets, which travel once unless they travel in two ways."""
    for found in pool.run(exchanges_of_sizes, ragged, "colwise", world_size=2):
        assert found == {
            "exchange_counts": ragged_inputs,
            "all_gather_ragged": ragged_inputs,
            "all_gather_batch": equal_inputs,
        }


class TiedTowers(nn.Module):
    """One table under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(11, 7), nn.Embedding(11, 7)
        self.items.weight = self.users.weight

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.users(users).sum(0) * self.items(items).sum(0)


def look_up_tied(mesh: DeviceMesh) -> list[Tensor]:
    rank = mesh.get_local_rank()
    torch.manual_seed(0)
    model = TiedTowers()
    users, items = torch.arange(3 + rank), torch.arange(2)
    expected = model(users, items)
    return [expected.detach(), autoshard(model, mesh, "paired", ragged=["items.weight"])(users, items).detach()]


def test_a_glob_for_one_name_of_a_tied_weight_is_for_all_its_sites(pool: Pool) -> None:
    for expected, got in pool.run(look_up_tied, world_size=2):
        assert torch.equal(expected, got)


def bad_globs(mesh: DeviceMesh, ragged: Any) -> None:
    autoshard(TOWERS.make(), mesh, "paired", ragged=ragged)


@pytest.mark.parametrize(
    ("ragged", "match"),
    [
        (["history", "users.*"], r"ragged entry 'users\.\*': it matches no weight.*history\.more\.weight.*Correct"),
        (["head.bias"], r"ragged entry 'head\.bias': it matches no weight"),
        ("history", r"ragged: got 'history'; expected True, False, or a collection of globs"),
        ([3], r"ragged entry 3: it matches no weight"),
        (None, r"ragged: got None"),
    ],
)
def test_globs_that_match_nothing_are_an_error(pool: Pool, ragged: Collection[str] | None, match: str) -> None:
    pool.expect_same_error(bad_globs, ragged, error=PlanError, match=match, world_size=2)


def uneven_items(mesh: DeviceMesh) -> None:
    model = autoshard(TOWERS.make(), mesh, "paired", ragged=("history",))
    rank = mesh.get_local_rank()
    model(torch.arange(4), torch.arange(2 + rank), torch.arange(2 + rank))


def test_inputs_that_are_not_ragged_must_still_be_of_one_size(pool: Pool) -> None:
    match = r"^item\.table: the shape of the input differs .*rank 0: \(2,\), rank 1: \(3,\)"
    pool.expect_same_error(uneven_items, error=InputError, match=match, world_size=2)
