"""Every contender of a benchmark but the floor computes what one process does: so no wrong thing is compared with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from tests.benchmarks import gpu
from tests.benchmarks.contender import FLOOR, Workload
from tests.benchmarks.dlrm import DLRM
from tests.benchmarks.linear import Linear
from tests.benchmarks.mlp import MLP
from tests.benchmarks.tables import Tables
from tests.pool import CHILD_ENVIRONMENT, REPOSITORY, Pool

SMALL: dict[str, Workload] = {
    "tables": Tables(tables=3, rows=11, dim=8, batch=4, ids=3),
    "linear": Linear(inputs=5, outputs=8, batch=3),
    "mlp": MLP(inputs=6, hidden=8, batch=3),
    "dlrm": DLRM(tables=3, rows=11, dim=8, batch=4),
}
Differences = dict[str, tuple[float, float]]


def differences(mesh: DeviceMesh, workload: Workload, slow: bool) -> Differences:
    """By contender: of its forward and of its first step from what one process computes, relative to the largest."""
    rank, world = mesh.get_local_rank(), mesh.size()
    expected = workload.reference(rank, world)
    found: Differences = {}
    # TorchRec asks the environment which rank it is, also where it is given a group.
    own = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    with warnings.catch_warnings(), mock.patch.dict(os.environ, own):
        warnings.simplefilter("ignore")
        for name, make in workload.contenders(mesh).items():
            if name == FLOOR or is_slow(name) != slow:
                continue
            contender = make()
            results = (contender.forward(), contender.step())
            assert all(result.shape == expected.shape for result in results), name
            forward, step = (float((contender.in_order(x) - expected).abs().max()) for x in results)
            found[name] = forward / float(expected.abs().max()), step / float(expected.abs().max())
    return found


def is_slow(name: str) -> bool:
    return "compiled" in name or "torchrec" in name


def require_right(pool: Pool, workload: str, world_size: int, slow: bool) -> None:
    results = pool.run(
        differences, SMALL[workload], slow, world_size=world_size, fresh_dynamo=slow, timeout=500 if slow else 60
    )
    for found in results:
        assert found
        assert all(forward < 1e-5 and step < 1e-5 for forward, step in found.values()), found


@pytest.mark.parametrize("workload", ["tables", "linear", "mlp", pytest.param("dlrm", marks=pytest.mark.slow)])
def test_what_is_timed_in_eager_mode_computes_what_one_process_does(pool: Pool, workload: str) -> None:
    require_right(pool, workload, 2, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("workload", SMALL)
def test_what_is_timed_compiled_or_in_torchrec_computes_what_one_process_does(pool: Pool, workload: str) -> None:
    require_right(pool, workload, 2, slow=True)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bytes_of_memory_traffic_are_those_of_the_tensors(world: int) -> None:
    sizes = Tables(tables=3, rows=11, dim=8, batch=4, ids=3)
    ids = torch.stack([sizes.draw(rank) for rank in range(world)]).int()
    columns = torch.stack([sizes.weight(number) for number in range(sizes.tables)]).chunk(world, 2)[0]
    rows = torch.stack([F.embedding(ids[:, number], columns[number]) for number in range(sizes.tables)])
    pooled, result = rows.sum(-2), sizes.reference(0, world)
    traffic = gpu.MemoryTraffic.of(sizes, world)
    assert traffic.lookup == rows.nbytes + ids.nbytes + pooled.nbytes
    assert traffic.whole == traffic.lookup + pooled.nbytes + result.nbytes


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    sizes = {"tables": 3, "rows": 11, "dim": 8, "batch": 4}
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--device=cpu", "--rounds=2", f"--out={tmp_path / 'out'}"]
    command += [f"--{part}={name}={number}" for part in ("front", "step") for name, number in sizes.items()]
    environment = {**os.environ, **CHILD_ENVIRONMENT}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=REPOSITORY, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "autoshard CUDA graphs: left out" in done.stdout
    facts = json.loads((tmp_path / "out").read_text())
    found = facts["front"]["found"]
    assert set(found) == {gpu.COPY, gpu.LOOKUP, gpu.FUSED, gpu.WHOLE}
    assert found[gpu.COPY]["/ copy"] == 1
    assert found[gpu.COPY]["bytes"] == found[gpu.WHOLE]["bytes"]
    assert list(facts["step"]["found"]) == ["autoshard eager", "autoshard compiled"]


def test_the_gpu_benchmark_without_a_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="--device cpu"), gpu.all_ranks("cuda"):
        pass
