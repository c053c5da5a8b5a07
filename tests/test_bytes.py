"""Every number of bytes in a summary is what a counting process group sees."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from autoshard import autoshard, graph_diff
from passes.traffic import BACKWARD, FORWARD, B, W
from tests.compare import loss_of
from tests.counting import counting_mesh
from tests.models import Model, model_of
from tests.pool import Pool

Seen = tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]


def said_and_seen(mesh: DeviceMesh, name: str, rows: int, replicated: bool) -> Seen:
    return said_and_seen_of(mesh, model_of(name), rows, replicated)


def said_and_seen_of(mesh: DeviceMesh, case: Model, rows: int, replicated: bool, plan: Any = "paired") -> Seen:
    """(direction, collective) -> bytes: what the diff says of all ranks, and what this rank's group counted."""
    counted, counter = counting_mesh(mesh)
    world, rank = (1, 0) if replicated else (mesh.size(), mesh.get_local_rank())
    inputs = case.split(world, rows, 0)[0][rank]
    placement = Replicate() if replicated else Shard(0)
    sharded = autoshard(case.make(), counted, plan, example_inputs=inputs, input_placement=placement)
    diff = graph_diff(sharded)
    said: Counter[tuple[str, str]] = Counter()
    for edit in diff.edits:
        for item in edit.traffic:
            value = item.bytes.subs({W: mesh.size(), B: rows})
            assert value.is_number, (edit.parameter, item)
            said[item.direction, item.collective] += float(value)
    for direction in (FORWARD, BACKWARD):
        assert float(diff.bytes(direction).subs(B, rows)) == sum(v for (d, _), v in said.items() if d == direction)
    run = torch.compile(sharded, backend="aot_eager", fullgraph=True)
    seen: Counter[tuple[str, str]] = Counter()
    with counter.counting() as calls:
        output = run(*inputs)
    for call in calls:
        seen[FORWARD, call.kind] += call.bytes_sent
    with counter.counting() as calls:
        loss_of(output, 0, rows).backward()
    for call in calls:
        seen[BACKWARD, call.kind] += call.bytes_sent
    return dict(said), dict(seen)


def require_said_is_seen(pool: Pool, model: str, world_size: int, rows: int, replicated: bool) -> None:
    results = pool.run(said_and_seen, model, rows, replicated, world_size=world_size, fresh_dynamo=True, timeout=180)
    require_equal_bytes(results)


def require_equal_bytes(results: list[Seen]) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for _, own in results:
        seen.update(own)
    said = {key: value for key, value in results[0][0].items() if value}
    assert said == pytest.approx({key: value for key, value in seen.items() if value}, abs=1e-6)
    assert said


@pytest.mark.parametrize(
    "replicated", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["batch-sharded", "replicated"]
)
@pytest.mark.parametrize(("world_size", "rows"), [(2, 6), pytest.param(4, 3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "model", [pytest.param("dlrm", marks=pytest.mark.slow), "mlp", pytest.param("two_tower", marks=pytest.mark.slow)]
)
def test_the_bytes_of_a_summary_are_those_on_the_wire(
    pool: Pool, model: str, world_size: int, rows: int, replicated: bool
) -> None:
    require_said_is_seen(pool, model, world_size, rows, replicated)


@pytest.mark.slow
def test_the_bytes_of_the_example_are_those_on_the_wire(pool: Pool) -> None:
    require_said_is_seen(pool, "criteo", 2, 5, replicated=False)
