"""The workloads by name, and whose times the others' are divided by."""

from __future__ import annotations

from collections.abc import Mapping

from tests.benchmarks.contender import FLOOR, Workload
from tests.benchmarks.dlrm import DLRM
from tests.benchmarks.linear import Linear
from tests.benchmarks.mlp import MLP
from tests.benchmarks.tables import Tables

WORKLOADS: Mapping[str, Workload] = {
    "front": Tables(tables=26, rows=20_000, dim=64, batch=1024, ids=4),
    "wide": Tables(tables=8, rows=100_000, dim=128, batch=512, ids=20),
    "many": Tables(tables=500, rows=1000, dim=16, batch=512, ids=2),
    "linear": Linear(inputs=4096, outputs=16_384, batch=64),
    "mlp": MLP(inputs=1024, hidden=4096, batch=256),
    "dlrm": DLRM(tables=26, rows=20_000, dim=64, batch=1024),
}
YARDSTICKS = (FLOOR, "torchrec column-wise fused", "torchrec column-wise dense", "dtensor compiled")
