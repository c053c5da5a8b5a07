"""Redistributions for batches whose size differs between ranks: the sizes travel first, then the values.

Rank r has n[r] rows, N in all; every rank knows all n[r] after one small gather, the only host synchronisation.
Nothing has a shape that depends on them but what stands between the two redistributions:

    function               from        -> to          forward                       backward
    exchange_counts        own sizes   -> all sizes   all_gather of k numbers       none
    all_gather_ragged      Shard(0)    -> Replicate   all_to_all of the same rows   all_to_all, sum of what comes back
                           (n[r], ...)    (N, ...)    to every rank
    rearrange_ragged       Shard(-1)   -> Shard(0)    all_to_all, columns put       the inverse
                           (N, d)         (n[r], D)   in order

Rows travel whole here, padded to ceil(D / W) columns where a rank has fewer: Inductor takes sizes that it does not
know as splits, but no products of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from passes.layout import AS_IT_IS, Wire, chunk_sizes
from passes.ops import checks
from passes.ops.collectives import all_gather, all_to_all, group_rank
from passes.ops.columns import side_by_side
from passes.ops.redistribute import apply


class _AllGatherRagged(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], total: int, group: str) -> Tensor:
        ctx.arguments = (x.size(0), counts, total, group)
        gathered = all_to_all(torch.cat([x] * len(counts)), counts, [x.size(0)] * len(counts), group)
        return gathered.narrow(0, 0, total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply(_ReduceScatterRagged, gradient, *ctx.arguments), None, None, None


class _ReduceScatterRagged(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, counts: list[int], total: int, group: str) -> Tensor:
        ctx.arguments = (counts, total, group)
        received = all_to_all(x, [rows] * len(counts), counts, group)
        return torch.stack(received.split([rows] * len(counts))).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply(_AllGatherRagged, gradient, *ctx.arguments), None, None, None, None


class _ColumnsToRowsRagged(Function):
    """(N, ..., d) -> (n, ..., D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, counts: list[int], num_columns: int, group: str, wire: Wire) -> Tensor:
        ctx.arguments = (x.size(0), counts, num_columns, group, wire[::-1])
        world = len(counts)
        sizes = chunk_sizes(num_columns, world)
        padded = F.pad(x, (0, sizes[0] - x.size(-1)))
        received = all_to_all(padded, [rows] * world, counts, group, wire[0])
        return side_by_side(received.view(world, rows, *padded.shape[1:]), sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply(_RowsToColumnsRagged, gradient, *ctx.arguments), None, None, None, None, None


class _RowsToColumnsRagged(Function):
    """(n, ..., D) -> (N, ..., d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: int, counts: list[int], num_columns: int, group: str, wire: Wire) -> Tensor:
        ctx.arguments = (x.size(0), counts, num_columns, group, wire[::-1])
        world = len(counts)
        sizes = chunk_sizes(num_columns, world)
        by_rank = F.pad(x, (0, world * sizes[0] - num_columns)).unflatten(-1, (world, sizes[0]))
        received = all_to_all(by_rank.movedim(-2, 0).flatten(0, 1), counts, [x.size(0)] * world, group, wire[0])
        return received.narrow(0, 0, total)[..., : sizes[group_rank(group)]].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply(_ColumnsToRowsRagged, gradient, *ctx.arguments), None, None, None, None, None


def exchange_counts(
    operands: list[Tensor | None], group: str, *, at: str | None = None, feature_dims: int = 0
) -> list[list[int]]:
    """How many rows of each operand every rank has.

    Args:
        operands: this rank's tensors; None, for one that was left out, counts as no rows.
        group: name of the process group.
        at: module path, for errors; None if the operands have been checked.
        feature_dims: dimensions at the end that are features; a tensor that has no other dimension is one row.

    Returns:
        For each operand the rows of each rank, and behind them their sum. Inside of torch.compile these are unbacked
        sizes; the sum is one of its own, because Inductor cannot take a tensor with a size of several into a backward.

    Raises:
        InputError: in eager mode, on all ranks, if an operand's further dimensions differ between ranks.
    """
    present = [x for x in operands if x is not None]
    if at is not None:
        named = {f"operand {place}": _batched(x, feature_dims) for place, x in enumerate(present)}
        checks.check_operands(named if len(present) > 1 else {"the input": named["operand 0"]}, group, at, ragged=True)
    mine = [0 if x is None else _batched(x, feature_dims).size(0) for x in operands]
    # Of a tensor of one number torch makes a constant, and runs what is done with it while it compiles: a collective,
    # for which a rank that compiles alone would wait for ever.
    own = torch.tensor([*mine, 0], device=present[0].device)[:-1]
    counts = all_gather(own, group).view(-1, len(mine))
    with torch._dynamo.patch_dynamo_config(capture_scalar_outputs=True):
        # All in one copy: the compiler reads a tensor's elements one by one.
        flat = torch.cat([counts, counts.sum(0, keepdim=True)]).t().flatten().cpu().tolist()
    for count in flat:
        torch._check(count >= 0)
    per_operand = len(flat) // len(mine)
    return [flat[start : start + per_operand] for start in range(0, len(flat), per_operand)]


def all_gather_ragged(x: Tensor, counts: list[int], group: str, *, feature_dims: int = 0) -> Tensor:
    """Shard(0) -> Replicate: (n, ...) -> (N, ...), the rows of all ranks, in the order of the mesh.

    Args:
        x: this rank's rows; the dimensions after the first are the same on all ranks.
        counts: the rows of each rank and their sum, from `exchange_counts`.
        group: name of the process group.
        feature_dims: as in `exchange_counts`.
    """
    *by_rank, total = counts
    torch._check(total <= sum(by_rank))
    return apply(_AllGatherRagged, _batched(x, feature_dims), by_rank, total, group)


def all_gather_ragged_optional(x: Tensor | None, counts: list[int], group: str) -> Tensor | None:
    """`all_gather_ragged` for an operand that may be left out: None stays None."""
    return None if x is None else all_gather_ragged(x, counts, group)


def all_gather_ragged_offsets(
    offsets: Tensor | None, id_counts: list[int], counts: list[int], group: str, *, at: str
) -> Tensor | None:
    """Offsets into this rank's ids -> offsets into the ids of all ranks, as int64. None stays None.

    Args:
        offsets: (counts[rank],), int32 or int64; first 0, ascending.
        id_counts: the ids of each rank.
        counts: the offsets of each rank.
        group: name of the process group.
        at: module path, for errors.

    Raises:
        InputError: in eager mode, on all ranks, if a rank's offsets do not begin with 0, do not ascend, or exceed its
            ids.
    """
    if offsets is None:
        return None
    gathered = all_gather_ragged(offsets, counts, group).long()
    if not torch.compiler.is_compiling():
        checks.check_offsets(list(gathered.split(counts[:-1])), id_counts[:-1], at)
    ids, lengths = (torch.tensor(by_rank[:-1], device=offsets.device) for by_rank in (id_counts, counts))
    return gathered + torch.repeat_interleave(ids.cumsum(0) - ids, lengths, output_size=counts[-1])


def bag_counts(
    id_counts: list[int], offset_counts: list[int], offsets: Tensor | None, include_last_offset: bool
) -> list[int]:
    """The bags of each rank."""
    if offsets is None:
        return id_counts
    if not include_last_offset:
        return offset_counts
    *by_rank, total = offset_counts
    return [*(count - 1 for count in by_rank), total - len(by_rank)]


def rearrange_ragged(
    columns: Tensor,
    like: Tensor,
    counts: list[int],
    num_columns: int,
    group: str,
    *,
    feature_dims: int = 0,
    wire: Wire = AS_IT_IS,
) -> Tensor:
    """Shard(-1) -> Shard(0): (N, ..., d) -> (n, ..., D), this rank's rows with all their columns.

    Args:
        columns: this rank's columns of all ranks' rows.
        like: this rank's input, whose leading dimensions (those before its last `feature_dims`) the result has.
        counts: the rows of each rank.
        num_columns: D.
        group: name of the process group.
        feature_dims: as in `exchange_counts`.
        wire: in which dtypes the columns, and their gradient, travel if theirs is wider.
    """
    shape = like.shape[: like.dim() - feature_dims]
    rows = shape[0] if shape else 1
    return apply(_ColumnsToRowsRagged, columns, rows, counts[:-1], num_columns, group, wire).view(*shape, num_columns)


def rearrange_bags_ragged(
    columns: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    include_last_offset: bool,
    counts: list[int],
    num_columns: int,
    group: str,
    *,
    wire: Wire = AS_IT_IS,
) -> Tensor:
    """`rearrange_ragged` for bags: (bags of all ranks, d) -> (this rank's bags, D)."""
    rows = ids.size(0) if offsets is None else offsets.size(0) - int(include_last_offset)
    return apply(_ColumnsToRowsRagged, columns, rows, counts[:-1], num_columns, group, wire)


def rows_to_columns_ragged(x: Tensor, counts: list[int], num_columns: int, group: str) -> Tensor:
    """Shard(0) -> Shard(-1): (n, ..., D) -> (N, ..., d), this rank's columns of all ranks' rows."""
    return apply(_RowsToColumnsRagged, _batched(x, 1), counts[-1], counts[:-1], num_columns, group, AS_IT_IS)


def reduce_scatter_ragged(partial: Tensor, like: Tensor, counts: list[int], group: str) -> Tensor:
    """Partial -> Shard(0): (N, ..., F) -> (n, ..., F), summed over the ranks; `like` is (n, ..., in) or (in,)."""
    *by_rank, total = counts
    rows = _batched(like, 1).size(0)
    out = apply(_ReduceScatterRagged, partial, rows, by_rank, total, group)
    return out.view(*like.shape[:-1], partial.size(-1))


def linear_ragged(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of (N, ..., in), N unknown to the compiler.

    The derivative of a matrix product asks whether a matrix of one column is stored as one row: whether N is 1. So one
    feature, or none, is multiplied instead.
    """
    if x.size(-1) > 1:
        return F.linear(x, weight, bias)
    products = (x.unsqueeze(-2) * weight).sum(-1)
    return products if bias is None else products + bias


def own_rows_ragged(x: Tensor, like: Tensor, counts: list[int], group: str) -> Tensor:
    """Replicate -> Shard(0): (N, ..., D) -> (n, ..., D), this rank's rows; `like` is (n, ...) or one row ()."""
    own = _own_rows(x, 1 if like.dim() == 0 else like.size(0), counts, group)
    return own.view(*like.shape, x.size(-1))


def own_bags_ragged(
    x: Tensor, ids: Tensor, offsets: Tensor | None, include_last_offset: bool, counts: list[int], group: str
) -> Tensor:
    """`own_rows_ragged` for bags: (bags of all ranks, D) -> (this rank's bags, D)."""
    rows = ids.size(0) if offsets is None else offsets.size(0) - int(include_last_offset)
    return _own_rows(x, rows, counts, group)


def _own_rows(x: Tensor, rows: int, counts: list[int], group: str) -> Tensor:
    # Indices, not a slice: the number of rows that the compiler sees is then the one of this rank's input.
    before = torch.tensor([0, *counts[:-1]], device=x.device).cumsum(0)[group_rank(group)]
    return x.index_select(0, torch.arange(rows, device=x.device) + before)


def _batched(x: Tensor, feature_dims: int) -> Tensor:
    return x.unsqueeze(0) if x.dim() == feature_dims else x
