"""The local ops of a rewritten graph: `torch.nn.functional` on this rank's columns.

They differ from torch's functions in two things only. Ids are checked in eager mode, so that every rank raises the same
error. And a rank that holds no column never calls a kernel: torch's embedding_bag raises on a weight of width 0.

    embedding       ids (...), weight (V, d)                  -> (..., d)
    embedding_bag   ids (bags, L), or (N,) with offsets       -> (bags, d)

Bags of all ranks in one call: `all_gather_offsets` puts the ranks' offsets behind one another, each moved by the ids
that come before it. With `include_last_offset` a rank's last offset ends its last bag; in the gathered offsets that
offset begins one bag more, which holds the ids that torch ignores, and the results of these bags are left out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ops import checks
from passes.ops.collectives import all_gather, group_size


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    at: str,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding` on this rank's columns.

    Args:
        ids: (...), int32 or int64, the same on all ranks.
        weight: (V, d), this rank's columns.
        at: module path, for errors.
        padding_idx, scale_grad_by_freq, sparse: as in torch; ids count over all ranks.

    Raises:
        IdRangeError: in eager mode, on all ranks, if an id is not a row of the table.
    """
    checks.check_ids(ids, weight.size(0), at)
    return F.embedding(ids, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def embedding_bag(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    *,
    at: str,
    mode: str = "mean",
    include_last_offset: bool = False,
    batches: int = 1,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding_bag` on this rank's columns.

    Args:
        ids: (bags, L), or (N,) with offsets; int32 or int64, the same on all ranks.
        weight: (V, d), this rank's columns.
        offsets: (bags,), where each bag begins; with `include_last_offset` (batches * (B + 1),), the offsets of each
            batch with their last one.
        per_sample_weights: the shape of ids, the dtype of weight; mode "sum" only.
        at: module path, for errors.
        mode, padding_idx, scale_grad_by_freq, sparse: as in torch; ids count over all ranks.

    Raises:
        IdRangeError: in eager mode, on all ranks, if an id is not a row of the table.
    """
    checks.check_ids(ids, weight.size(0), at)
    if weight.size(1) == 0:
        bags = ids.size(0) if offsets is None else offsets.size(0)
        out = _empty_bags(weight, per_sample_weights, bags)
    else:
        out = F.embedding_bag(
            ids,
            weight,
            offsets,
            scale_grad_by_freq=scale_grad_by_freq,
            mode=mode,
            sparse=sparse,
            per_sample_weights=per_sample_weights,
            padding_idx=padding_idx,
        )
    if include_last_offset and offsets is not None:
        by_batch: Tensor = out.unflatten(0, (batches, -1))
        return by_batch[:, :-1].flatten(0, 1)
    return out


def _empty_bags(weight: Tensor, per_sample_weights: Tensor | None, bags: int) -> Tensor:
    """(bags, 0), still a function of the weights, so that every rank's backward runs the same collectives."""
    out = weight.new_zeros(bags, 0) + weight.sum()
    if per_sample_weights is not None:
        out = out + per_sample_weights.sum().to(out.dtype)
    return out


def all_gather_offsets(offsets: Tensor | None, ids: Tensor, group: str, *, at: str) -> Tensor | None:
    """(B,) offsets into this rank's ids -> (W*B,) offsets into the ids of all ranks, as int64.

    Args:
        offsets: (B,), int32 or int64; first 0, ascending. None, for bags of 2-D ids, stays None.
        ids: (N,), this rank's ids; N is the same on all ranks.
        group: name of the process group.
        at: module path, for errors.

    Raises:
        InputError: in eager mode, on all ranks, if the number of offsets differs between ranks.
    """
    if offsets is None:
        return None
    checks.check_equal_sizes(offsets, group, at)
    world = group_size(group)
    gathered = all_gather(offsets, group).view(world, -1).long()
    base = torch.arange(world, device=offsets.device).unsqueeze(1) * ids.size(0)
    return (gathered + base).flatten()
