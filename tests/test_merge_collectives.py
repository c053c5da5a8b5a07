"""Collectives that can run together are one; what may not be moved stays where it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import autoshard, graph_diff
from passes.plan import Colwise
from tests.compare import Result, Setting, loss_of, require_equal, train_case
from tests.counting import counting_mesh
from tests.models import Model, dense, ids, in_equal_parts
from tests.pool import Pool


class Front(nn.Module):
    """The lookups of a click model: ids (B, tables) and lists (B, 3) -> (B, tables, 6)."""

    def __init__(self, tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(11, 6, mode="sum") for _ in range(tables))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([table(ids[:, n : n + 1]) for n, table in enumerate(self.tables)], 1)


class Mixed(nn.Module):
    """Lookups of all kinds and widths, one input for several of them, towers side by side, weights that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.wide = nn.EmbeddingBag(11, 7, mode="mean"), nn.EmbeddingBag(11, 1)
        self.plain, self.same = nn.Embedding(11, 5), nn.Embedding(13, 8, padding_idx=1)
        self.weighted = nn.EmbeddingBag(11, 3, mode="sum")
        self.one, self.other = nn.Linear(5, 7), nn.Linear(5, 7)
        self.upper, self.second = nn.Linear(7, 4), nn.Linear(7, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        weights = torch.sigmoid(x[:, :3])
        rows = [
            self.bag(ids),
            self.wide(ids),
            self.plain(ids[:, 0]),
            self.same(ids).sum(1),
            self.weighted(ids, None, weights),
        ]
        towers = [self.upper(torch.relu(self.one(x))), self.second(torch.relu(self.other(x)))]
        return torch.cat(rows, -1), *(norm(tower) for norm, tower in zip(self.norms, towers, strict=False))


class Chained(nn.Module):
    """The ids of the second lookup are computed from the result of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(11, 7), nn.Embedding(11, 7)
        self.third = nn.Embedding(11, 7)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.first(ids)
        return found + self.second(found.argmax(-1)) * self.third(ids)


class Written(nn.Module):
    """An input is changed in place between two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(5, 7), nn.Linear(5, 7)
        self.table, self.more = nn.Embedding(11, 7), nn.Embedding(11, 7)
        for layer in (self.one, self.table):
            layer.requires_grad_(False)  # torch keeps the input of a layer that is trained, and then refuses the change

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x, ids = x * 1, ids + 0
        first = self.one(x) * self.table(ids)
        x.mul_(3)
        ids.remainder_(5)
        return first + self.other(x) * self.more(ids)


class Renormed(nn.Module):
    """A table that is renormed, looked up before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.renormed = nn.Embedding(11, 7), nn.Embedding(11, 7, max_norm=0.5)
        self.last = nn.Embedding(11, 7)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.table(ids[:, 0]) + self.renormed(ids[:, 1])
        return found + self.last(ids[:, 2]) + F.embedding(ids[:, 0], self.renormed.weight)


class WithoutGradient(nn.Module):
    """One of three lookups is made without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = (nn.Embedding(11, 7) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        first = self.one(ids)
        with torch.no_grad():
            second = self.other(ids + 0)
        return first * second + self.last(ids)


_ids = in_equal_parts(lambda rows, seed: (ids(rows, seed, 11, 3),))
_both = in_equal_parts(lambda rows, seed: (dense(rows, seed, 5), ids(rows, seed + 1000, 11, 3)))

CASES = {
    "mixed": Model(Mixed, _both),
    "chained": Model(Chained, in_equal_parts(lambda rows, seed: (ids(rows, seed, 11),))),
    "written": Model(Written, in_equal_parts(lambda rows, seed: (dense(rows, seed, 5), ids(rows, seed + 1000, 11)))),
    "renormed": Model(Renormed, _ids),
    "without_gradient": Model(WithoutGradient, _ids),
}


def train(mesh: DeviceMesh, settings: list[Setting]) -> list[Result]:
    return [train_case(mesh, CASES[setting.model], setting) for setting in settings]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_merged_collectives_compute_what_one_process_does(pool: Pool, name: str, world_size: int) -> None:
    settings = [Setting(name, examples=name == "without_gradient"), Setting(name, examples=True, optimizer="adam")]
    for results in zip(*pool.run(train, settings, world_size=world_size, timeout=120), strict=True):
        require_equal(list(results))


@pytest.mark.parametrize("name", ["mixed", "chained", "without_gradient"])
def test_merged_collectives_compile_to_one_graph(pool: Pool, name: str) -> None:
    settings = [Setting(name, examples=name == "without_gradient", backend="aot_eager")]
    for results in zip(*pool.run(train, settings, world_size=3, fresh_dynamo=True, timeout=120), strict=True):
        require_equal(list(results))


def look_up_owned(mesh: DeviceMesh) -> bool:
    plan = {"first.weight": Colwise((0,)), "second.weight": Colwise((1,)), "third.weight": Colwise((0, 1))}
    parts, everything = CASES["chained"].split(2, 3, 1)
    rank = mesh.get_local_rank()
    expected = CASES["chained"].make()(*everything).chunk(2)[rank]
    return torch.equal(expected, autoshard(CASES["chained"].make(), mesh, plan)(*parts[rank]))


def test_lookups_that_wait_for_another_are_not_sent_with_it(pool: Pool) -> None:
    assert all(pool.run(look_up_owned, world_size=2))


# ---------------------------------------------------------------- how many


def collectives_of(mesh: DeviceMesh, make: str, arguments: tuple[Any, ...], backend: str | None) -> list[Counter[str]]:
    """Forward and backward."""
    counted, counter = counting_mesh(mesh)
    model = autoshard(globals()[make](*arguments).double(), counted)
    inputs = (dense(4, 0, 5), ids(4, 1, 11, 3)) if make == "Mixed" else (ids(4, 0, 11, arguments[0]),)
    run: Any = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    with counter.counting() as forward:
        output = run(*inputs)
    with counter.counting() as backward:
        loss_of(output, 0, 4).backward()
    return [Counter(call.kind for call in calls) for calls in (forward, backward)]


@pytest.mark.parametrize("tables", [26, 500])
def test_a_front_of_tables_takes_two_collectives_and_one_backward(pool: Pool, tables: int) -> None:
    """In eager mode one more gather tells the sizes, which are checked."""
    for forward, backward in pool.run(collectives_of, "Front", (tables,), None, world_size=2, timeout=120):
        assert forward == {"all_gather": 2, "all_to_all": 1}
        assert backward == {"all_to_all": 1}


def test_a_compiled_front_takes_two_collectives_and_one_backward(pool: Pool) -> None:
    found = pool.run(collectives_of, "Front", (26,), "aot_eager", world_size=2, fresh_dynamo=True, timeout=120)
    for forward, backward in found:
        assert forward == {"all_gather": 1, "all_to_all": 1}
        assert backward == {"all_to_all": 1}


def test_inputs_of_several_kinds_take_a_gather_for_each_dtype(pool: Pool) -> None:
    """Forward gathers of ids, of x, of weights, of the towers' middle; rearrangements of lookups and of two levels of
    linears. Backward their counterparts, but x has no gradient, and one all_reduce of what stays whole.
    """
    found = pool.run(collectives_of, "Mixed", (), "aot_eager", world_size=2, fresh_dynamo=True, timeout=120)
    for forward, backward in found:
        assert forward == {"all_gather": 3, "all_to_all": 3}
        assert backward == {"all_to_all": 3, "reduce_scatter": 1, "all_reduce": 1}


def edits_of(mesh: DeviceMesh, name: str) -> list[str]:
    return [edit.what for edit in graph_diff(autoshard(CASES[name].make(), mesh)).edits if edit.op == "collective"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "mixed",
            [
                "5 all_gathers in one",  # the ids of two bags and of a plain lookup, ids with weights, weights, x
                "2 all_gathers in one",
                "5 column rearrangements in one",
                "2 column rearrangements in one",
                "2 column rearrangements in one",
                "4 gradient all_reduces in one",
            ],
        ),
        ("chained", ["2 column rearrangements in one"]),
        ("written", ["2 all_gathers in one", "2 all_gathers in one"]),  # before and after the change
    ],
)
def test_what_was_merged_is_told(pool: Pool, name: str, expected: list[str]) -> None:
    assert pool.run(edits_of, name, world_size=2) == [expected] * 2


# ---------------------------------------------------------------- a gradient that is not there


class Two(nn.Module):
    """Two results, each with weights that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.LayerNorm(5), nn.LayerNorm(5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


def gradients_of_one_result(mesh: DeviceMesh, backend: str | None) -> tuple[list[bool], bool]:
    model = autoshard(Two(), mesh, gradient_reduction="sum")
    run: Any = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    x = torch.arange(10.0).view(2, 5)
    (run(x)[0] * x).sum().backward()
    alone = Two()
    (alone.one(x) * x).sum().backward()
    gradient, expected = model.one.weight.grad, alone.one.weight.grad
    assert gradient is not None
    assert expected is not None
    same = torch.allclose(gradient.full_tensor(), mesh.size() * expected)  # type: ignore[operator]  # a DTensor
    return [p.grad is None or not p.grad.to_local().any() for p in model.other.parameters()], same  # type: ignore[operator]  # as above


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_what_a_loss_does_not_depend_on_gets_no_gradient(pool: Pool, backend: str | None) -> None:
    for absent, same in pool.run(gradients_of_one_result, backend, world_size=2, fresh_dynamo=backend is not None):
        assert absent == [True, True]
        assert same


def missing_in_eager(mesh: DeviceMesh) -> list[bool]:
    model = autoshard(Two(), mesh)
    model(torch.ones(2, 5))[0].sum().backward()
    return [p.grad is None for p in model.other.parameters()]


def test_an_optimizer_leaves_alone_what_has_no_gradient(pool: Pool) -> None:
    assert pool.run(missing_in_eager, world_size=2) == [[True, True]] * 2
