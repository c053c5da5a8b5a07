"""Tables whose columns are on some of the ranks, against one process."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import Counter
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh

from autoshard import Colwise, autoshard, graph_diff
from autoshard.parameters import local_shapes, whole, whole_gradient
from passes.traffic import BACKWARD, FORWARD, B, W
from tests import owned_models
from tests.counting import counting_mesh
from tests.models import relative
from tests.owned_models import FIXED, TWELVE, Table
from tests.pool import Pool

OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, eps=1e-2),
    "sparse_adam": lambda parameters, lr: torch.optim.SparseAdam(parameters, lr=lr, eps=1e-2),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    tables: tuple[Table, ...] = TWELVE
    ragged: bool = True
    backend: str | None = None
    optimizer: str = "sgd"
    sparse: bool = False
    steps: int = 3
    fewest: int = 20


@dataclasses.dataclass
class Result:
    wrong: list[str]
    graphs: int


def train(mesh: DeviceMesh, setting: Setting) -> Result:
    """Steps of the sharded model and of one process; with ragged batches every rank's is of another size."""
    world, rank = mesh.size(), mesh.get_local_rank()
    model = owned_models.make(setting.tables, sparse=setting.sparse)
    reference = copy.deepcopy(model)
    plan = owned_models.plan(setting.tables, world)
    sharded = autoshard(model, mesh, plan, ragged=setting.ragged, gradient_reduction="sum")
    torch._dynamo.utils.counters.clear()
    run = sharded
    if setting.backend is not None:
        run = torch.compile(sharded, backend=setting.backend, fullgraph=True, dynamic=True)
    optimizers = [OPTIMIZERS[setting.optimizer](m.parameters(), lr=0.125) for m in (sharded, reference)]
    wrong = []
    for step in range(setting.steps):
        sizes = [5 + 2 * step + 3 * r for r in range(world)] if setting.ragged else [5] * world
        seeds = [100 * step + (r if setting.ragged else 0) for r in range(world)]
        batches = [owned_models.batch(setting.tables, n, s, setting.fewest) for n, s in zip(sizes, seeds, strict=True)]
        out, expected = run(batches[rank]), reference(owned_models.joined(setting.tables, batches))
        upstream = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(step))
        rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        if not torch.equal(out, expected[rows]) and (step == 0 or relative(expected[rows], out) > 1e-12):
            wrong.append(f"output of step {step}: {relative(expected[rows], out)}")
        (out * upstream[rows]).sum().backward()
        leaves = [x for name, x in batches[rank].items() if "weights" in name]
        got = [_taken(x) for x in leaves]
        (expected * upstream).sum().backward()
        want = [_taken(x) for x in leaves]
        if len(got) != len(want) or any(relative(a, b) > 1e-12 for a, b in zip(want, got, strict=True)):
            wrong.append(f"gradients of the weights per sample in step {step}")
        shapes = local_shapes(sharded)
        for (name, p), q in zip(sharded.named_parameters(), reference.parameters(), strict=True):
            gradient = whole_gradient(p, shapes.get(name), mesh)
            if gradient is None or q.grad is None or relative(q.grad.to_dense(), gradient) > 1e-12:
                wrong.append(f"gradient of {name} in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, p), q in zip(sharded.named_parameters(), reference.parameters(), strict=True):
            if relative(q.detach(), whole(p, shapes.get(name), mesh)) > 1e-12:
                wrong.append(f"{name} after step {step}")
    return Result(wrong, torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _taken(leaf: Tensor) -> Tensor:
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    return gradient


def require_equal(pool: Pool, setting: Setting, world_size: int) -> None:
    results = pool.run(train, setting, world_size=world_size, timeout=400, fresh_dynamo=setting.backend is not None)
    for result in results:
        assert result.wrong == []
        assert result.graphs == (0 if setting.backend is None else 1)


@pytest.mark.parametrize(
    ("world_size", "optimizer"),
    [
        *((world_size, "adam") for world_size in (1, 2, 3, 4)),
        *(pytest.param(world_size, "sgd", marks=pytest.mark.slow) for world_size in (1, 2, 3, 4)),
    ],
)
@pytest.mark.parametrize("ragged", [True, False])
def test_twelve_tables_train_as_in_one_process(pool: Pool, ragged: bool, world_size: int, optimizer: str) -> None:
    require_equal(pool, Setting(ragged=ragged, optimizer=optimizer, fewest=0 if ragged else 20), world_size)


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [
        pytest.param("aot_eager", 2, marks=pytest.mark.slow),
        pytest.param("aot_eager", 3, marks=pytest.mark.slow),
        pytest.param("inductor", 2, marks=pytest.mark.slow),
        pytest.param("inductor", 3, marks=pytest.mark.slow),
        pytest.param("inductor", 4, marks=pytest.mark.slow),
    ],
)
def test_one_graph_serves_batches_of_all_sizes(pool: Pool, backend: str, world_size: int) -> None:
    require_equal(pool, Setting(backend=backend), world_size)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ragged", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_tables_compile(pool: Pool, ragged: bool, backend: str) -> None:
    require_equal(pool, Setting((TWELVE[4], FIXED[1]), backend=backend, ragged=ragged), 2)


def test_sparse_tables_train_as_in_one_process(pool: Pool) -> None:
    tables = tuple(table for table in TWELVE if table.mode != "max")
    require_equal(pool, Setting(tables, sparse=True, optimizer="sparse_adam"), 3)
    require_equal(pool, Setting(tables, sparse=True, optimizer="sgd", ragged=False), 2)


# ---------------------------------------------------------------- what is sent


@dataclasses.dataclass
class Seen:
    """A compiled step of one rank: its collectives, the bytes that leave it, and the host's reads."""

    kinds: dict[str, list[str]]
    sent: dict[str, float]
    reads: int
    said: dict[str, float]


def on_some_ranks(tables: tuple[Table, ...], world: int) -> dict[str, Colwise]:
    """Every table on one rank or, of more than two, on two."""
    found = owned_models.plan(tables, world)
    some = {name: s.ranks if isinstance(s, Colwise) else (world - 1,) for name, s in found.items()}
    return {name: Colwise(ranks if len(ranks) < world else ranks[:1]) for name, ranks in some.items()}


def step_of(mesh: DeviceMesh, tables: tuple[Table, ...], ragged: bool) -> Seen:
    counted, counter = counting_mesh(mesh)
    inputs = owned_models.batch(tables, 5, 0)
    sharded = autoshard(
        owned_models.make(tables),
        counted,
        on_some_ranks(tables, mesh.size()),
        ragged=ragged,
        example_inputs=None if ragged else (inputs,),
    )
    reads = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        reads.extend(node for node in graph.graph.nodes if node.target is torch.ops.aten._local_scalar_dense.default)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    run = torch.compile(sharded, backend=backend, fullgraph=True, dynamic=True)
    with counter.counting() as forward:
        out = run(inputs)
    with counter.counting() as backward:
        out.sum().backward()
    said: Counter[str] = Counter()
    for edit in graph_diff(sharded).edits:
        for item in edit.traffic:
            value = item.bytes.subs({W: mesh.size(), B: 5})
            said[item.direction] += float(value) if value.is_number else 0.0
    calls = {FORWARD: forward, BACKWARD: backward}
    return Seen(
        kinds={direction: [call.kind for call in found] for direction, found in calls.items()},
        sent={direction: sum(call.bytes_sent for call in found) for direction, found in calls.items()},
        reads=len({_read_from(node) for node in reads}),
        said=dict(said),
    )


def _read_from(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor of whose elements one is read: the compiler reads them one by one."""
    source = node.all_input_nodes[0]
    while source.target in (torch.ops.aten.select.int, torch.ops.aten.unbind.int, operator.getitem):
        source = source.all_input_nodes[0]
    return source


def bytes_of(tables: tuple[Table, ...], world: int, rank: int, ragged: bool) -> dict[str, int]:
    """What has to leave a rank: ids and offsets as int32 and weights as they are to owners, rows to everybody."""
    inputs = owned_models.batch(tables, 5, 0)
    forward = backward = 0
    for number, table in enumerate(tables):
        ranks = on_some_ranks(tables, world)[f"lookups.{number}.weight"].ranks
        others = len([owner for owner in ranks if owner != rank])
        ids = inputs[f"ids{number}"].numel()
        offsets = inputs[f"offsets{number}"].numel() if table.kind in ("offsets", "last") else 0
        forward += others * 4 * (ids + offsets) + others * (24 if ragged else 0)
        columns = torch.arange(table.dim).chunk(len(ranks))[ranks.index(rank)].numel() if rank in ranks else 0
        forward += (world - 1) * 5 * columns * 8
        backward += 5 * (table.dim - columns) * 8
        if table.weighted:
            forward += others * 8 * ids
            backward += (world - 1) * 8 * ids if rank in ranks else 0
    return {FORWARD: forward, BACKWARD: backward}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_twelve_ragged_lookups_take_four_collectives_and_one_read(pool: Pool, world_size: int) -> None:
    """Sizes, ids with offsets, weights, results; backward results, weights."""
    results = pool.run(step_of, TWELVE, True, world_size=world_size, fresh_dynamo=True, timeout=120)
    for rank, seen in enumerate(results):
        assert seen.kinds == {FORWARD: ["all_to_all"] * 4, BACKWARD: ["all_to_all"] * 2}
        assert seen.reads == 1
        assert seen.sent == bytes_of(TWELVE, world_size, rank, ragged=True)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_lookups_of_equal_batches_read_nothing(pool: Pool, world_size: int) -> None:
    tables = tuple(dataclasses.replace(table, weighted=False) for table in FIXED)
    results = pool.run(step_of, tables, False, world_size=world_size, fresh_dynamo=True, timeout=120)
    for rank, seen in enumerate(results):
        assert seen.kinds == {FORWARD: ["all_to_all"] * 2, BACKWARD: ["all_to_all"]}
        assert seen.reads == 0
        assert seen.sent == bytes_of(tables, world_size, rank, ragged=False)
    for direction in (FORWARD, BACKWARD):
        assert results[0].said[direction] == sum(seen.sent[direction] for seen in results)
