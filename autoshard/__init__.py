"""autoshard: shards the tables and layers of a plain PyTorch model by column, before torch.compile."""

from autoshard.api import autoshard, graph_diff, sharding_plan, unshard
from autoshard.auto_plan import AutoPlan
from autoshard.calibrate import calibrate
from autoshard.diff import GraphDiff
from autoshard.jagged import KeyedJaggedTensor
from autoshard.optim import clip_grad_norm_
from autoshard.profile import HardwareProfile
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
    "AutoPlan",
    "AutoshardError",
    "CaptureError",
    "Certificate",
    "Colwise",
    "ConsumedError",
    "EquivalenceError",
    "GraphDiff",
    "HardwareProfile",
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
    "calibrate",
    "clip_grad_norm_",
    "graph_diff",
    "sharding_plan",
    "unshard",
    "verify",
]
