"""Every contender of a benchmark but the floor computes what one process does: so no wrong thing is compared with."""

from __future__ import annotations

import os
import warnings
from unittest import mock

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.benchmarks.contender import FLOOR, Workload
from tests.benchmarks.dlrm import DLRM
from tests.benchmarks.linear import Linear
from tests.benchmarks.mlp import MLP
from tests.benchmarks.tables import Tables
from tests.pool import Pool

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
