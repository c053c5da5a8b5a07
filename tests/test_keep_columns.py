"""Values stay column-sharded between ops that work by column; where anything needs whole rows, they do not."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from autoshard import autoshard, graph_diff
from tests.compare import Result, Setting, require_equal, train_case
from tests.counting import counting_mesh
from tests.models import Model, dense, ids, in_equal_parts, relative
from tests.pool import Pool
from tests.shared_weights import CASES as SHARED
from tests.test_bytes import Seen, require_equal_bytes, said_and_seen_of

Counts = tuple[Counter[str], Counter[str]]


class Gated(nn.Module):
    """Two linears of one input, multiplied, into a third; the result is added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Forked(nn.Module):
    """One hidden value for two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = nn.Linear(5, 7), nn.Linear(7, 4), nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        return self.one(hidden), self.other(torch.sigmoid(hidden))


class Towers(nn.Module):
    """Two pairs of linears that can run together; their results are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = (nn.ModuleList(nn.Linear(*s) for _ in range(2)) for s in ((5, 7), (7, 4)))

    def forward(self, x: Tensor) -> Tensor:
        one, other = (up(torch.relu(low(x))) for low, up in zip(self.lower, self.upper, strict=True))
        return one.relu_() + other.tanh_()


class Spelled(nn.Module):
    """Column-wise work in all spellings, some of it in place, on (B, 3, 7)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 7), nn.Linear(7, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = F.gelu(x, approximate="tanh") * 2.0
        x += 0.5
        x = F.leaky_relu(x, 0.1, True).sigmoid().to(torch.float64)
        x = torch.sub(1.5, x).mul_(3).clamp(max=1.0) - self.relu(x.neg() + 0.25) ** 2
        return self.head(torch.add(x, x, alpha=2))


def build_mlp() -> nn.Module:
    layers = [nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 6), nn.Linear(6, 3)]
    return nn.Sequential(*layers)


def build_narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 2), nn.GELU(), nn.Linear(2, 3, bias=False))


def build_bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(11, 7, mode="mean"), nn.Hardswish(), nn.Identity(), nn.Linear(7, 5))


_x = in_equal_parts(lambda rows, seed: (dense(rows, seed, 5),))
_ids = in_equal_parts(lambda rows, seed: (ids(rows, seed, 11, 3),))
CASES = {
    "mlp": Model(build_mlp, _x),
    "narrow": Model(build_narrow, _x),
    "gated": Model(Gated, _x),
    "forked": Model(Forked, _x),
    "towers": Model(Towers, _x),
    "spelled": Model(Spelled, _ids),
    "bag": Model(build_bag, _ids),
    "tied": SHARED["tied_bag"],
}
ROWWISE = {
    "mlp": {"2.weight", "5.weight"},
    "narrow": {"2.weight"},
    "gated": {"down.weight"},
    "forked": {"one.weight", "other.weight"},
    "towers": {"upper.0.weight", "upper.1.weight"},
    "spelled": {"head.weight"},
    "bag": {"3.weight"},
    "tied": set(),
}


def stays(model: nn.Module) -> list[str]:
    return [edit.what for edit in graph_diff(model).edits if " stay until " in edit.what]


def train(mesh: DeviceMesh, settings: list[Setting]) -> list[Result]:
    return [train_case(mesh, CASES[setting.model], setting) for setting in settings]


def require_all_equal(found: list[list[Result]]) -> None:
    for results in zip(*found, strict=True):
        require_equal(list(results))


@pytest.mark.parametrize("examples", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4)), 3])
def test_kept_columns_compute_what_one_process_does(pool: Pool, world_size: int, examples: bool) -> None:
    settings = [
        setting
        for name in CASES
        for setting in (
            Setting(name, plan="paired", examples=examples, reduction="sum" if examples else "mean"),
            Setting(name, plan="paired", examples=examples, replicated=True, optimizer="adam", rows=4),
        )
    ]
    found = pool.run(train, settings, world_size=world_size, timeout=600)
    require_all_equal(found)
    for setting, result in zip(settings, found[0], strict=True):
        rowwise = {key for key, strategy in result.strategies.items() if strategy == "rowwise"}
        assert rowwise == ROWWISE[setting.model]


@pytest.mark.slow
def test_adam_and_sums_train_as_in_one_process(pool: Pool) -> None:
    settings = [Setting(name, plan="paired", optimizer="adam", reduction="sum") for name in CASES]
    require_all_equal(pool.run(train, settings, world_size=3, timeout=600))


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "mlp")])
def test_kept_columns_compile_to_one_graph(pool: Pool, name: str) -> None:
    settings = [Setting(name, plan="paired", backend="aot_eager")]
    require_all_equal(pool.run(train, settings, world_size=3, fresh_dynamo=True, timeout=180))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated", "spelled"])
def test_inductor_compiles_kept_columns(pool: Pool, name: str) -> None:
    settings = [Setting(name, plan="paired", backend="inductor", replicated=placed) for placed in (False, True)]
    require_all_equal(pool.run(train, settings, world_size=2, fresh_dynamo=True, timeout=600))


def kept_in(mesh: DeviceMesh, name: str, examples: bool, replicated: bool) -> list[str]:
    case = CASES[name]
    placement = Replicate() if replicated else Shard(0)
    example = case.one_batch() if examples else None
    return stays(autoshard(case.make(), mesh, "paired", example_inputs=example, input_placement=placement))


@pytest.mark.parametrize("examples", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["mlp", "gated", *(pytest.param(n, marks=pytest.mark.slow) for n in list(CASES)[3:])])
def test_what_stays_is_told(pool: Pool, name: str, examples: bool) -> None:
    for replicated in (False, True):
        (found,) = pool.run(kept_in, name, examples, replicated, world_size=1)
        assert len(found) == (2 if name in ("mlp", "towers") else 1)
    if name == "mlp":
        assert found == ["columns of 0 stay until 2", "columns of 4 stay until 5"]


# ---------------------------------------------------------------- what does not stay


class Between(nn.Module):
    """Two linears with something in between."""

    def __init__(self, work: str) -> None:
        super().__init__()
        self.work = work
        self.first, self.second = nn.Linear(5, 6), nn.Linear(12 if work == "cat" else 6, 3)
        self.norm, self.prelu, self.batch = nn.LayerNorm(6), nn.PReLU(6), nn.BatchNorm1d(6)
        self.bias = nn.Parameter(torch.randn(6))
        self.hook = nn.ReLU()
        self.hook.register_forward_hook(lambda module, args, out: out * 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        if self.work == "whole result":
            return hidden, self.second(torch.relu(hidden))
        if self.work == "residual":
            hidden = torch.relu(hidden)
            return self.second(hidden).sum(-1, keepdim=True) + hidden
        if self.work == "size":
            return self.second(torch.relu(hidden)) * hidden.shape[-1]
        if self.work == "written beside":
            scaled = hidden * 2
            return self.second(self.relu(hidden) + scaled)
        if self.work == "written through an alias":
            same = hidden.contiguous()
            same.mul_(2)
            return self.second(hidden)
        works = {
            "softmax": lambda h: torch.softmax(h, -1),
            "norm": self.norm,
            "prelu": self.prelu,
            "batch": self.batch,
            "bias": lambda h: h + self.bias,
            "cat": lambda h: torch.cat([h, h], -1),
            "reshape": lambda h: h.view(-1, 2, 3).flatten(1),
            "flip": lambda h: h.flip(-1),
            "sum": lambda h: h - h.mean(-1, keepdim=True),
            "whole operand": lambda h: h * torch.cat([x, x[:, :1]], -1),
            "hook": self.hook,
            "normalize": lambda h: F.normalize(h, dim=-1),
            "glu": lambda h: F.glu(torch.cat([h, h], -1)),
            "threshold of a tensor": lambda h: torch.clamp(h, min=x[0, 0]),
        }
        return self.second(works[self.work](hidden))


WORKS = (
    *"softmax norm prelu bias cat reshape flip sum hook normalize residual size".split(),
    *("whole operand", "whole result", "written beside", "written through an alias", "threshold of a tensor"),
)


def train_between(mesh: DeviceMesh, work: str, setting: Setting) -> tuple[Result, list[str]]:
    case = Model(lambda: Between(work), _x)
    return train_case(mesh, case, setting), stays(autoshard(case.make(), mesh, setting.plan))


@pytest.mark.parametrize("work", WORKS)
def test_what_mixes_columns_or_needs_rows_is_given_rows(pool: Pool, work: str) -> None:
    """Also by a plan that asks for rowwise; the automatic one does not."""
    plan = {"second.weight": "rowwise", "first.*": "colwise"}
    rows = 1 if work == "threshold of a tensor" else 3
    world_size = 1 if work == "threshold of a tensor" else 2
    for result, kept in pool.run(train_between, work, Setting(work, plan=plan, rows=rows), world_size=world_size):
        require_equal([result])
        assert kept == []
        assert result.strategies["second.weight"] == "rowwise"
    (_, kept), *_ = pool.run(train_between, work, Setting(work, plan="paired", rows=rows), world_size=world_size)
    assert kept == []


class Unequal(nn.Module):
    """Two bags of different ids, of which nothing says that they are as many."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.EmbeddingBag(11, 7, mode="sum"), nn.EmbeddingBag(11, 7, mode="sum")
        self.head = nn.Linear(7, 3)

    def forward(self, ids: Tensor, one: Tensor) -> Tensor:
        return self.head(self.one(ids) + self.other(one))


def add_unequal(mesh: DeviceMesh) -> list[Any]:
    """One bag of `other` is added to all of `one`; then as many, which the examples tell."""
    case = Model(Unequal, lambda ranks, rows, seed: ([], ()))
    left, right = ids(3, mesh.get_local_rank(), 11, 2), ids(3, mesh.get_local_rank() + 7, 11, 2)
    spec = {"head.weight": "rowwise", "*": "colwise"}
    sharded = autoshard(case.make(), mesh, spec)
    told = autoshard(case.make(), mesh, spec, example_inputs=(left, right))
    differences = [relative(case.make()(left, right[:1]), sharded(left, right[:1]))]
    differences.append(relative(case.make()(left, right), told(left, right)))
    return [max(differences), len(stays(sharded)), len(stays(told))]


def test_values_of_which_it_is_not_known_that_they_are_of_one_shape_are_given_rows(pool: Pool) -> None:
    for difference, *kept in pool.run(add_unequal, world_size=2):
        assert difference <= 1e-12
        assert kept == [0, 1]


def test_ragged_batches_are_given_rows(pool: Pool) -> None:
    settings = [Setting("mlp", plan=plan, ragged=True) for plan in ("paired", {"2.weight": "rowwise", "*": "colwise"})]
    found = pool.run(train, settings, world_size=3, timeout=120)
    require_all_equal(found)
    assert [result.strategies["2.weight"] for result in found[0]] == ["colwise", "rowwise"]


class OneRow(nn.Module):
    """x (B, 5) -> (3,): the linears see the first row alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.relu(self.one(x[0])))


def one_row(mesh: DeviceMesh, replicated: bool, cast: bool) -> tuple[bool, float, int]:
    """Whether the dtype is that of one process, the relative difference, and how often columns stay."""
    torch.manual_seed(0)
    model = OneRow()
    sharded = autoshard(copy.deepcopy(model), mesh, "paired", input_placement=Replicate() if replicated else Shard(0))
    x = torch.randn(2, 5) + (0 if replicated else mesh.get_local_rank())
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        expected, got = model(x), sharded(x)
    return got.dtype == expected.dtype, relative(expected.detach(), got.detach()), len(stays(sharded))


@pytest.mark.parametrize("cast", [False, True])
def test_an_input_of_one_dimension_and_autocast_give_what_they_give_in_one_process(pool: Pool, cast: bool) -> None:
    for replicated in (False, True):
        for same_dtype, difference, kept in pool.run(one_row, replicated, cast, world_size=3):
            assert same_dtype
            assert difference < (0.02 if cast else 1e-6)
            assert kept == 1


# ---------------------------------------------------------------- dropout


def build_dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3))


DROPPING = Model(build_dropping, _x)


def train_dropping(mesh: DeviceMesh, settings: list[Setting]) -> list[Result]:
    return [train_case(mesh, DROPPING, setting) for setting in settings]


@pytest.mark.parametrize("examples", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dropout_on_columns_is_exact_where_inputs_are_replicated_and_in_evaluation(pool: Pool, examples: bool) -> None:
    settings = [
        Setting("dropping", plan="paired", examples=examples, replicated=True, by_rank=True, backend=None),
        Setting("dropping", plan="paired", examples=examples, training=False),
        Setting("dropping", plan="paired", examples=examples, training=False, replicated=True),
    ]
    require_all_equal(pool.run(train_dropping, settings, world_size=3, timeout=120))


def masks(mesh: DeviceMesh, seed_by_rank: bool, backend: str | None) -> tuple[Tensor, bool, int]:
    """What is left of this rank's rows of ones, and whether the gradient is dropped as they are."""
    width = 32
    model = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.25), nn.Linear(width, width, bias=False))
    for layer in (model[0], model[2]):
        layer.weight.data = torch.eye(width)
    model[0].bias.data.zero_()
    sharded = autoshard(model, mesh, "paired")
    run = sharded if backend is None else torch.compile(sharded, backend=backend, fullgraph=True)
    torch.manual_seed(mesh.get_local_rank() if seed_by_rank else 0)
    x = torch.ones(16, width, requires_grad=True)
    out = run(x)
    out.sum().backward()
    assert x.grad is not None
    return out.detach(), torch.equal(x.grad, out), len(stays(sharded))


@pytest.mark.parametrize("seed_by_rank", [False, True])
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_the_parts_of_a_row_are_dropped_independently(pool: Pool, seed_by_rank: bool, backend: str | None) -> None:
    found = pool.run(masks, seed_by_rank, backend, world_size=2, fresh_dynamo=backend is not None)
    assert all(matches and kept == 1 for _, matches, kept in found)
    rows = torch.cat([left for left, _, _ in found])
    assert torch.equal(rows.unique(), torch.tensor([0.0, 1 / 0.75]))
    dropped = rows == 0
    one, other = dropped.chunk(2, 1)
    assert abs(float(dropped.double().mean()) - 0.25) < 0.05
    assert abs(float((one & other).double().mean()) - 0.0625) < 0.03


# ---------------------------------------------------------------- how many, how much


def counts(mesh: DeviceMesh, replicated: bool, needs_gradient: bool) -> tuple[list[Counts], float]:
    """Collectives forward and backward of an MLP 1024-4096-1024, ours and DTensor's, and how far they are apart."""
    counted, counter = counting_mesh(mesh)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    x, placement = torch.randn(4, 1024), Replicate() if replicated else Shard(0)
    sharded = autoshard(copy.deepcopy(model), counted, "paired", input_placement=placement)
    runs: list[Any] = [torch.compile(sharded, backend="aot_eager", fullgraph=True)]
    if replicated:
        runs.append(parallelize_module(model, counted, {"0": ColwiseParallel(), "2": RowwiseParallel()}))
    found: list[Counts] = []
    results = []
    for run in runs:
        own = x.clone().requires_grad_(needs_gradient)
        with counter.counting() as forward:
            out = run(own)
        with counter.counting() as backward:
            out.sin().sum().backward()
        found.append((Counter(call.kind for call in forward), Counter(call.kind for call in backward)))
        results.append([out.detach(), *([own.grad] if own.grad is not None else [])])
    return found, max(relative(a, b) for a, b in zip(results[0], results[-1], strict=True))


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_an_mlp_of_replicated_inputs_takes_the_collectives_that_dtensor_does(pool: Pool, needs_gradient: bool) -> None:
    for (ours, theirs), apart in pool.run(counts, True, needs_gradient, world_size=2, fresh_dynamo=True):
        assert ours == ({"all_reduce": 1}, {"all_reduce": 1} if needs_gradient else {})
        assert ours == theirs
        assert apart < 1e-5


def test_a_pair_of_linears_gathers_once_and_scatters_once(pool: Pool) -> None:
    for ((forward, backward),), _ in pool.run(counts, False, True, world_size=2, fresh_dynamo=True):
        assert forward == {"all_gather": 1, "reduce_scatter": 1}
        assert backward == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}  # the bias of the second linear


def bytes_of(mesh: DeviceMesh, name: str, replicated: bool) -> Seen:
    return said_and_seen_of(mesh, CASES[name], 4, replicated)


@pytest.mark.parametrize("replicated", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "mlp")])
def test_the_bytes_of_kept_columns_are_those_on_the_wire(pool: Pool, name: str, replicated: bool) -> None:
    results = pool.run(bytes_of, name, replicated, world_size=3, fresh_dynamo=True, timeout=180)
    require_equal_bytes(results)
    if name == "mlp" and not replicated:
        rows, world = 4, 3
        forward = {"all_gather": world * (world - 1) * (5 + 4), "reduce_scatter": (world - 1) * world * (4 + 3)}
        said = {kind: value for (direction, kind), value in results[0][0].items() if direction == "forward"}
        assert said == {kind: 8 * rows * numbers for kind, numbers in forward.items()}
