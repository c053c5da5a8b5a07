"""torch.compile of a sharded model with Inductor: one full graph, and no recompile after the second batch size."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard import autoshard
from tests.compare import loss_of, tensors, whole
from tests.counting import counting_mesh
from tests.models import model_of, relative
from tests.pool import Pool


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Dynamo's counters after each batch size, and the largest relative difference to one process."""

    graphs: list[int]
    breaks: int
    difference: float


def compiled_steps(mesh: DeviceMesh, name: str, examples: bool, sizes: list[int]) -> Compiled:
    torch._dynamo.utils.counters.clear()
    case = model_of(name)
    world, rank = mesh.size(), mesh.get_local_rank()
    original = case.make()
    example = case.split(world, 3, 0)[0][rank] if examples else None
    sharded = autoshard(copy.deepcopy(original), mesh, "paired", example_inputs=example)
    run = torch.compile(sharded, fullgraph=True)
    counters, graphs, worst = torch._dynamo.utils.counters, [], 0.0
    for step, rows in enumerate(sizes):
        parts, everything = case.split(world, rows, step)
        output = run(*parts[rank])
        loss_of(output, rank * rows, rows).backward()
        expected = original(*everything)
        loss_of(expected, 0, rows * world).backward()
        for want, got in zip(tensors(expected), tensors(output), strict=True):
            worst = max(worst, relative(want.chunk(world)[rank].detach(), got.detach()))
        for (_, want), (_, got) in zip(original.named_parameters(), sharded.named_parameters(), strict=True):
            gradients = whole(want.grad), whole(got.grad)
            assert gradients[0] is not None
            assert gradients[1] is not None
            worst = max(worst, relative(*gradients))
        original.zero_grad()
        sharded.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    return Compiled(graphs, sum(counters["graph_break"].values()), worst)


def collectives_of_two_calls(mesh: DeviceMesh) -> list[list[str]]:
    counted, counter = counting_mesh(mesh)
    run = torch.compile(
        autoshard(torch.nn.Linear(5, 4), counted, "paired", ragged=True), backend="aot_eager", fullgraph=True
    )
    calls = []
    for _ in range(2):
        with counter.counting() as made:
            run(torch.ones(3 + mesh.get_local_rank(), 5))
        calls.append([call.kind for call in made])
    return calls


def test_to_compile_runs_no_collective(pool: Pool) -> None:
    """A rank may compile alone: its batch may be of a size that it has not seen."""
    for first, second in pool.run(collectives_of_two_calls, world_size=2, fresh_dynamo=True):
        assert first == second
        assert second


# Minutes on two cores, and the same machinery: `make test` compiles the smallest, `aot_eager` does the others.
_LARGE = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "examples"),
    [
        ("mlp", False),
        pytest.param("mlp", True, marks=_LARGE),
        pytest.param("two_tower", False, marks=_LARGE),
        pytest.param("two_tower", True, marks=_LARGE),
        pytest.param("dlrm", False, marks=_LARGE),
        pytest.param("dlrm", True, marks=_LARGE),
        pytest.param("criteo", False, marks=_LARGE),
        pytest.param("one_block", False, marks=_LARGE),
        pytest.param("transformer", False, marks=_LARGE),
        pytest.param("transformer", True, marks=_LARGE),
    ],
)
def test_inductor_compiles_one_full_graph_and_no_more_after_the_second_size(
    pool: Pool, model: str, examples: bool
) -> None:
    results = pool.run(compiled_steps, model, examples, [3, 5, 7, 4], world_size=2, fresh_dynamo=True, timeout=900)
    for result in results:
        assert result.breaks == 0
        assert result.graphs[0] == 1
        assert result.graphs[1] <= 2
        assert result.graphs[1:] == [result.graphs[1]] * 3
        assert result.difference <= 1e-12
