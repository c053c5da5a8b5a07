"""autoshard: shards the tables and layers of a plain PyTorch model by column, before torch.compile."""

from autoshard.api import autoshard, graph_diff, sharding_plan, unshard
from autoshard.diff import GraphDiff
from autoshard.jagged import KeyedJaggedTensor
from autoshard.optim import clip_grad_norm_
from autoshard.sparse_features import SparseFeatures, SparseFeaturesAllToAll
from autoshard.verify import Certificate, verify
from passes.errors import (
    AgreementError,
    AutoshardError,
    CaptureError,
    ConsumedError,
    EquivalenceError,
    IdRangeError,
    InputError,
    MeshError,
    PlanError,
    RewriteError,
)
from passes.plan import Colwise, PlanRow, ShardingPlan

__all__ = [
    "AgreementError",
    "AutoshardError",
    "CaptureError",
    "Certificate",
    "Colwise",
    "ConsumedError",
    "EquivalenceError",
    "GraphDiff",
    "IdRangeError",
    "InputError",
    "KeyedJaggedTensor",
    "MeshError",
    "PlanError",
    "PlanRow",
    "RewriteError",
    "ShardingPlan",
    "SparseFeatures",
    "SparseFeaturesAllToAll",
    "autoshard",
    "clip_grad_norm_",
    "graph_diff",
    "sharding_plan",
    "unshard",
    "verify",
]
