"""The former implementation of sharded lookups, still in torch: where it is right, ours agrees with it bit for bit.

It takes column-sharded weights as ShardedTensors, looks the ids up rank by rank, and gives gradients that are sums over
the ranks. So that the order of these sums does not matter, gradients are small whole numbers here. Where the former
implementation is wrong see `test_former_faults.py`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import autoshard
from tests.matrix.case import BAG, EMBEDDING, Batch, Case, batches, initial_weights
from tests.matrix.layers import make_model
from tests.pool import Pool

pytest.importorskip("torch.distributed._shard.sharding_spec.chunk_sharding_spec_ops.embedding_bag")

MESHES = ((0, 1), (0, 1, 2, 3), (2, 3, 0, 1), (3, 0, 1, 2))
LOOKUPS = (
    Case(EMBEDDING, (5, 4), 17, 12),
    Case(EMBEDDING, (6, 7, 6), 21, 11),
    Case(EMBEDDING, (8, 6, 5, 4), 23, 13),
    Case(EMBEDDING, (4,), 15, 14),
    Case(EMBEDDING, (34,), 15, 14, padding_idx=10),
    Case(EMBEDDING, (8, 6, 5, 4), 23, 13, padding_idx=12),
    Case(BAG, (5, 5), 17, 14),
    Case(BAG, (5, 4), 17, 12, mode="mean"),
    Case(BAG, (7, 8), 30, 9, mode="mean"),
    Case(BAG, (6, 7), 21, 11, mode="max"),
    Case(BAG, (8, 6), 24, 13),
    Case(BAG, (5, 5), 17, 14, padding_idx=6),
    Case(BAG, (4, 3), 16, 14, padding_idx=12),
    Case(BAG, (4, 3), 16, 14, mode="max", padding_idx=12),
    Case(BAG, (5, 5), 17, 14, weighted=True),
    Case(BAG, (8,), 23, 13, bags=3),
    Case(BAG, (12,), 16, 12, mode="max", bags=4),
)


@dataclass(frozen=True)
class Found:
    """What one rank got out of one implementation: its rows, and the gradient of its columns."""

    output: Tensor
    gradient: Tensor

    def equals(self, other: Found) -> bool:
        return torch.equal(self.output, other.output) and torch.equal(self.gradient, other.gradient)


def whole_numbers(case: Case, place: int) -> Batch:
    """A rank's batch, with a gradient and weights that make every product and sum exact."""
    batch = batches(case, 0)[place]
    weights = None if batch.weights is None else (batch.weights * 4).round()
    return replace(batch, weights=weights, gradient=(batch.gradient * 4).round())


def former(mesh: DeviceMesh, case: Case) -> Found:
    from torch.distributed._shard import shard_parameter
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    # A group in an order of its own is one of the faults: the former implementation takes its members for places in it.
    ranks = dist.get_process_group_ranks(mesh.get_group())
    group = dist.group.WORLD if len(ranks) == dist.get_world_size() else mesh.get_group()
    holder = nn.Module()
    holder.weight = nn.Parameter(initial_weights(case)[0])
    placements = [f"rank:{rank}/cpu" for rank in ranks]
    shard_parameter(holder, "weight", ChunkShardingSpec(dim=1, placements=placements), process_group=group)
    batch = whole_numbers(case, mesh.get_local_rank())
    if case.op == EMBEDDING:
        out = F.embedding(batch.input, holder.weight, padding_idx=case.padding_idx)
    else:
        options = {"padding_idx": case.padding_idx, "mode": case.mode, "per_sample_weights": batch.weights}
        out = F.embedding_bag(batch.input, holder.weight, batch.offsets, **options)
    out.backward(batch.gradient)
    return Found(out.detach(), holder.weight.local_tensor().grad)


def ours(mesh: DeviceMesh, case: Case) -> Found:
    model = autoshard(make_model(case), mesh, "colwise", gradient_reduction="sum")
    batch = whole_numbers(case, mesh.get_local_rank())
    arguments = batch.arguments[: 1 if case.op == EMBEDDING else 3]
    out = model(*arguments)
    out.backward(batch.gradient)
    return Found(out.detach(), next(model.parameters()).grad.to_local())


def disagreements(mesh: DeviceMesh, cases: list[Case]) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the former implementation is deprecated
        return [str(case) for case in cases if not former(mesh, case).equals(ours(mesh, case))]


@pytest.mark.parametrize("ranks", MESHES, ids=str)
def test_where_the_former_implementation_is_right_ours_agrees_to_the_last_bit(
    pool: Pool, ranks: tuple[int, ...]
) -> None:
    cases = [case.on(*ranks) for case in LOOKUPS]
    assert pool.run(disagreements, cases, ranks=ranks, timeout=120.0) == [[]] * len(ranks)
