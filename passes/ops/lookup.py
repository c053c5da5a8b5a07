"""The local ops of a rewritten graph: `torch.nn.functional` on this rank's columns.

They differ from torch's functions in two things only. Ids are checked in eager mode, so that every rank raises the same
error. And a rank that holds no column calls the kernel with one: torch's embedding_bag raises on a weight of width 0.

    embedding       ids (...), weight (V, d)                  -> (..., d)
    embedding_bag   ids (bags, L), or (N,) with offsets       -> (bags, d)

Bags of all ranks in one call: `offsets_of_all` puts the ranks' offsets behind one another, each moved by the ids
that come before it. With `include_last_offset` a rank's last offset ends its last bag; in the gathered offsets that
offset begins one bag more, which holds the ids that torch ignores, and the results of these bags are left out.
"""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ops import checks
from passes.ops.collectives import group_size
from passes.ops.jagged import segment_index


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
    checks.check_sparse(sparse, at)
    columns = without_empty(weight)
    sparse = sparse and columns is weight
    out = F.embedding(ids, columns, padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
    return out[..., : weight.size(1)]


def embedding_bag(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    *,
    at: str,
    mode: str = "mean",
    include_last_offset: bool = False,
    batches: int | list[int] = 1,
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
    checks.check_sparse(sparse, at)
    columns = without_empty(weight)
    bags = _first_bags(offsets, batches) if include_last_offset and offsets is not None else None
    if sparse and bags is not None and offsets is not None:
        ids, offsets, per_sample_weights = only_bags(ids, offsets, per_sample_weights, bags)
        bags = None
    out = F.embedding_bag(
        ids,
        columns,
        offsets,
        scale_grad_by_freq=scale_grad_by_freq,
        mode=mode,
        sparse=sparse and columns is weight,
        per_sample_weights=per_sample_weights,
        padding_idx=padding_idx,
    )[:, : weight.size(1)]
    return out if bags is None else out.index_select(0, bags)


def _first_bags(offsets: Tensor, batches: int | list[int]) -> Tensor:
    """Which of the bags that `offsets` begin stay: all but the last one of each batch, which holds what torch ignores.

    By index, so that no size comes of it that the compiler has not been told.
    """
    if isinstance(batches, int):
        numbers = torch.arange(offsets.size(0), device=offsets.device)
        return numbers.view(batches, -1)[:, :-1].flatten()
    counts = torch.tensor(batches[:-1], device=offsets.device)
    return segment_index((counts + 1).cumsum(0) - (counts + 1), counts, batches[-1])


def only_bags(
    ids: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, bags: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, offsets and weights of some of the bags: a sparse gradient has entries for every id that is looked up.

    Their number depends on the offsets, so that this is for eager mode, as sparse gradients are.
    """
    lengths = torch.diff(offsets, append=offsets.new_tensor([ids.size(0)]))
    stays = torch.zeros_like(offsets, dtype=torch.bool).index_fill(0, bags, True).repeat_interleave(lengths)
    kept = lengths[bags]
    weights = None if per_sample_weights is None else per_sample_weights[stays]
    return ids[stays], kept.cumsum(0) - kept, weights


def without_empty(weight: Tensor) -> Tensor:
    """The weight, or for a rank without columns one column of zeros, which still carries a gradient.

    Every rank has to run the same checks and the same collectives, backward too.
    """
    return weight if weight.size(1) > 0 else F.pad(weight, (0, 1))


def checked_ids(
    ids: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    group: str,
    *,
    at: str,
    include_last_offset: bool = False,
    ragged: bool = False,
    replicated: bool = False,
) -> Tensor:
    """The ids of a bag. All that it takes is of one kind on all ranks, and fits together.

    Raises:
        InputError: otherwise, in eager mode, on all ranks.
    """
    checks.check_bag(
        ids,
        offsets,
        per_sample_weights,
        group,
        at,
        include_last_offset=include_last_offset,
        ragged=ragged,
        replicated=replicated,
    )
    return ids


@overload
def narrow_ids(ids: Tensor) -> Tensor: ...


@overload
def narrow_ids(ids: None) -> None: ...


def narrow_ids(ids: Tensor | None) -> Tensor | None:
    """Ids or offsets as they travel: int64 becomes int32. None stays None.

    What int32 does not hold becomes the nearest that it does.

    For tables of fewer than 2^31 rows, so that what is out of range stays out of range.
    """
    if ids is None or ids.dtype != torch.int64 or not checks.is_strided(ids):
        return ids
    limits = torch.iinfo(torch.int32)
    return ids.clamp(limits.min, limits.max).to(torch.int32)


def replicated_ids(ids: Tensor, num_embeddings: int, group: str, *, at: str) -> Tensor:
    """The ids, which every rank was promised to have the same of.

    Raises:
        InputError: in eager mode, on all ranks, if their sizes differ.
        IdRangeError: in eager mode, on all ranks, if an id of any rank is not a row of the table.
    """
    checks.check_equal_sizes(ids, group, at)
    checks.check_ids(ids, num_embeddings, at, group)
    return ids


def in_bags(x: Tensor | None, offsets: Tensor | None, include_last_offset: bool) -> Tensor | None:
    """Ids (or their weights) of this rank, none where it has no bag.

    They would join the last bag of another rank. (And torch's kernel for max crashes on ids without a bag.)
    """
    if x is None or offsets is None or offsets.size(0) > int(include_last_offset):
        return x
    return x[:0]


def offsets_of_all(gathered: Tensor | None, ids: Tensor, group: str, *, at: str) -> Tensor | None:
    """The offsets of all ranks, each into its own rank's ids, -> offsets into the ids of all ranks, as int64.

    Args:
        gathered: (W*B,), int32 or int64; of each rank first 0, ascending. None, for bags of 2-D ids, stays None.
        ids: (N,), this rank's ids; N is the same on all ranks.
        group: name of the process group.
        at: module path, for errors.

    Raises:
        InputError: in eager mode, on all ranks, if a rank's offsets do not begin with 0, do not ascend, or exceed its
            ids.
    """
    if gathered is None:
        return None
    world = group_size(group)
    by_rank = gathered.view(world, gathered.size(0) // world).long()
    checks.check_offsets(list(by_rank.unbind()), [ids.size(0)] * world, at)
    base = torch.arange(world, device=gathered.device).unsqueeze(1) * ids.size(0)
    return (by_rank + base).flatten()
