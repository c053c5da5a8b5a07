"""Collectives that can run together are one; what may not be moved stays where it is."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard import autoshard, graph_diff
from passes.plan import Colwise
from tests.compare import Result, Setting, loss_of, require_equal, train_case
from tests.counting import counting_mesh
from tests.models import Model, dense, ids, in_equal_parts, relative
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


class Activated(nn.Module):
    """Results are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(11, 7), nn.Embedding(11, 1)
        self.one, self.more = nn.Linear(7, 4), nn.Linear(7, 5)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, ids: Tensor) -> Tensor:
        rows, scale = self.relu(self.table(ids)), torch.relu_(self.other(ids))
        return torch.cat([self.relu(self.one(rows)), self.more(rows).mul_(2)], -1) * scale


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
    "activated": Model(Activated, _ids),
    "without_gradient": Model(WithoutGradient, _ids),
}


SLOW = [pytest.mark.slow]


def train(mesh: DeviceMesh, settings: list[Setting]) -> list[Result]:
    return [train_case(mesh, CASES[setting.model], setting) for setting in settings]


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param(name, world_size, marks=[] if world_size == 3 or (name, world_size) == ("mixed", 1) else SLOW)
        for name in CASES
        for world_size in (1, 2, 3)
    ],
)
def test_merged_collectives_compute_what_one_process_does(pool: Pool, name: str, world_size: int) -> None:
    settings = [Setting(name, examples=name == "without_gradient"), Setting(name, examples=True, optimizer="adam")]
    for results in zip(*pool.run(train, settings, world_size=world_size, timeout=120), strict=True):
        require_equal(list(results))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_result_may_be_changed_in_place(pool: Pool, ragged: bool, world_size: int) -> None:
    settings = [Setting("activated", ragged=ragged), Setting("activated", replicated=True)]
    for results in zip(*pool.run(train, settings, world_size=world_size), strict=True):
        require_equal(list(results))


@pytest.mark.slow
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
    model = autoshard(globals()[make](*arguments).double(), counted, "paired")
    inputs = (dense(4, 0, 5), ids(4, 1, 11, 3)) if make == "Mixed" else (ids(4, 0, 11, arguments[0]),)
    run: Any = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    with counter.counting() as forward:
        output = run(*inputs)
    with counter.counting() as backward:
        loss_of(output, 0, 4).backward()
    return [Counter(call.kind for call in calls) for calls in (forward, backward)]


@pytest.mark.parametrize("tables", [26, pytest.param(500, marks=pytest.mark.slow)])
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
    """Forward gathers of ids and of weights, with x; a rearrangement of lookups and a sum of the towers. Backward their
    counterparts, but x has no gradient, and one all_reduce of what stays whole.
    """
    found = pool.run(collectives_of, "Mixed", (), "aot_eager", world_size=2, fresh_dynamo=True, timeout=120)
    for forward, backward in found:
        assert forward == {"all_gather": 2, "all_to_all": 1, "reduce_scatter": 1}
        assert backward == {"all_to_all": 1, "all_gather": 1, "all_reduce": 1}


def edits_of(mesh: DeviceMesh, name: str) -> list[str]:
    return [
        edit.what for edit in graph_diff(autoshard(CASES[name].make(), mesh, "paired")).edits if edit.op == "collective"
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "mixed",
            [
                "columns of one stay until upper",
                "columns of other stay until second",
                "5 all_gathers in one",  # the ids of two bags and of a plain lookup, ids with weights, weights, x
                "5 column rearrangements in one",
                "2 reduce_scatters in one",
                "6 gradient all_reduces in one",
            ],
        ),
        ("chained", []),  # two lookups are one, the third waits for them
        ("written", ["2 all_gathers in one", "2 all_gathers in one"]),  # before and after the change
    ],
)
def test_what_was_merged_is_told(pool: Pool, name: str, expected: list[str]) -> None:
    assert pool.run(edits_of, name, world_size=2) == [expected] * 2


# ---------------------------------------------------------------- a gradient that is not there


class Tasks(nn.Module):
    """Two tasks that share nothing but the batch: lookups, linears on one input, and weights that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(11, 7) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(5, 7) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(7, 3) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(3) for _ in range(2))

    def forward(self, x: Tensor, ids: Tensor) -> list[Tensor]:
        parts = zip(self.tables, self.layers, self.heads, self.norms, strict=True)
        return [norm(head(torch.tanh(layer(x) * table(ids)))) for table, layer, head, norm in parts]


def batch_of_tasks(ranks: int) -> list[tuple[Tensor, Tensor]]:
    parts, everything = in_equal_parts(lambda rows, seed: (dense(rows, seed, 5), ids(rows, seed, 11)))(ranks, 3, 0)
    return [*parts, everything]


def train_tasks(mesh: DeviceMesh, by_rank: list[list[int]]) -> tuple[list[str], list[str], float]:
    """The parameters without a gradient, sharded and in one process, and the largest difference of the others.

    by_rank: for each rank the tasks of its loss, one backward each.
    """
    rank = mesh.get_local_rank()
    *parts, everything = batch_of_tasks(mesh.size())
    torch.manual_seed(0)
    original = Tasks().double()
    sharded = autoshard(copy.deepcopy(original), mesh, "paired", gradient_reduction="sum")
    outputs, expected = sharded(*parts[rank]), original(*everything)
    for task in range(2):
        rows = [
            whole_rows for place, whole_rows in enumerate(expected[task].chunk(mesh.size())) if task in by_rank[place]
        ]
        if task in by_rank[rank]:
            outputs[task].square().sum().backward(retain_graph=True)
        if rows:
            torch.cat(rows).square().sum().backward()
    absent = [name for name, p in sharded.named_parameters() if p.grad is None]
    differences = [0.0]
    for (_, p), (_, want) in zip(sharded.named_parameters(), original.named_parameters(), strict=True):
        if isinstance(p.grad, DTensor) and want.grad is not None:
            differences.append(relative(want.grad, p.grad.full_tensor()))
    return absent, [name for name, p in original.named_parameters() if p.grad is None], max(differences)


@pytest.mark.parametrize("tasks", [[0], [1], [0, 1]])
def test_what_no_loss_depends_on_gets_no_gradient(pool: Pool, tasks: list[int]) -> None:
    for absent, expected, difference in pool.run(train_tasks, [tasks, tasks], world_size=2):
        assert absent == expected
        assert len(absent) == 7 * (2 - len(tasks))
        assert difference <= 1e-12


def train_ranks_apart(mesh: DeviceMesh) -> tuple[list[str], float]:
    """The loss of rank 0 is of both tasks, that of rank 1 of the second alone."""
    rank = mesh.get_local_rank()
    *parts, everything = batch_of_tasks(2)
    torch.manual_seed(0)
    original = Tasks().double()
    sharded = autoshard(copy.deepcopy(original), mesh, "paired", gradient_reduction="sum")
    outputs, expected = sharded(*parts[rank]), original(*everything)
    sum(out.square().sum() for out in outputs[rank:]).backward()
    (expected[0].chunk(2)[0].square().sum() + expected[1].square().sum()).backward()
    absent = [name for name, p in sharded.named_parameters() if p.grad is None]
    gradients = [(p.grad, q.grad) for p, q in zip(original.parameters(), sharded.parameters(), strict=True)]
    return absent, max(relative(a, b.full_tensor()) for a, b in gradients)  # type: ignore[arg-type, union-attr]  # none is absent


def test_a_loss_of_one_rank_reaches_what_the_others_do_not_depend_on(pool: Pool) -> None:
    for absent, difference in pool.run(train_ranks_apart, world_size=2):
        assert absent == []
        assert difference <= 1e-12
