"""The redistributions: functions that change an activation's placement, each defined once with its gradient.

B rows per rank, W ranks, N = W*B rows in all, D columns of which this rank holds d:

    function              from        -> to           forward                    backward
    all_gather_batch      Shard(0)    -> Replicate    all_gather                 reduce_scatter sum
    reduce_scatter_batch  Partial     -> Shard(0)     reduce_scatter sum         all_gather
    rearrange_columns     Shard(-1)   -> Shard(0)     all_to_all, columns put    the inverse
                          (N, d)         (B, D)       in order
    rows_to_columns       Shard(0)    -> Shard(-1)    the inverse of that        rearrange_columns
                          (B, D)         (N, d)
    slice_columns         Replicate   -> Shard(-1)    this rank's columns        all_gather
                          (N, D)         (N, d)
    own_rows              Replicate   -> Shard(0)     this rank's rows           zeros for the others' rows
    gather_columns        Shard(-1)   -> Replicate    all_gather, columns put    this rank's columns
                          (N, d)         (N, D)       in order
    copy_to_columns       Replicate   -> Replicate    identity                   all_reduce sum
                          (feeds an op on this rank's columns)
    all_reduce_partial    Partial     -> Replicate    all_reduce sum             identity
    replicate_parameter   a replicated parameter in   identity                   all_reduce mean or sum
                          a batch-sharded graph
    local_columns         a parameter's columns       this rank's shard          the gradient, scaled

A gather of activations has the sum of the ranks' gradients as its gradient, because every rank's loss counts. (torch's
own functional all_gather does the same; for a loss that is replicated that is W times too much, which is why
`gather_columns` is another row of the table.) Each pair is one another's gradient, so all of them differentiate twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from passes.errors import InputError, describe
from passes.layout import AS_IT_IS, Wire, chunk_offset, chunk_sizes
from passes.ops import checks
from passes.ops.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    group_rank,
    group_size,
    reduce_scatter,
)
from passes.ops.columns import columns_for_rows, rows_for_columns, side_by_side

MEAN = "mean"
SUM = "sum"
NONE = "none"


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply(_ReduceScatter, gradient, ctx.group), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply(_AllGather, gradient, ctx.group), None


class _ColumnsToRows(Function):
    """(W*B, d) -> (B, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_columns: int, group: str, wire: Wire) -> Tensor:
        ctx.num_columns, ctx.group, ctx.wire = num_columns, group, wire
        (rows,) = columns_for_rows(group, (num_columns,), x, dtype=wire[0])
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply(_RowsToColumns, gradient, ctx.num_columns, ctx.group, ctx.wire[::-1]), None, None, None


class _RowsToColumns(Function):
    """(B, D) -> (W*B, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_columns: int, group: str, wire: Wire) -> Tensor:
        ctx.num_columns, ctx.group, ctx.wire = num_columns, group, wire
        (columns,) = rows_for_columns(group, (num_columns,), x, dtype=wire[0])
        return columns

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply(_ColumnsToRows, gradient, ctx.num_columns, ctx.group, ctx.wire[::-1]), None, None, None


class _GatherColumns(Function):
    """(N, d) -> (N, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_columns: int, group: str, wire: Wire) -> Tensor:
        ctx.num_columns, ctx.group, ctx.wire = num_columns, group, wire
        sizes = chunk_sizes(num_columns, group_size(group))
        padded = torch.nn.functional.pad(x, (0, sizes[0] - x.size(1)))
        return side_by_side(all_gather(padded, group, wire[0]).view(len(sizes), *padded.shape), sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply(_SliceColumns, gradient, ctx.num_columns, ctx.group, ctx.wire[::-1]), None, None, None


class _SliceColumns(Function):
    """(N, D) -> (N, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_columns: int, group: str, wire: Wire) -> Tensor:
        ctx.num_columns, ctx.group, ctx.wire = num_columns, group, wire
        world, rank = group_size(group), group_rank(group)
        start = chunk_offset(num_columns, world, rank)
        return x.narrow(1, start, chunk_sizes(num_columns, world)[rank]).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply(_GatherColumns, gradient, ctx.num_columns, ctx.group, ctx.wire[::-1]), None, None, None


class _CopyToColumns(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply(_AllReduce, gradient, ctx.group), None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply(_CopyToColumns, gradient, ctx.group), None


class _ReduceGradient(Function):
    """`_CopyToColumns` for a parameter, whose gradient may be sparse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if gradient.is_sparse:
            return sum_sparse(gradient, ctx.group), None
        return apply(_AllReduce, gradient, ctx.group), None


class _NoColumns(Function):
    """What a rank outside of a table's mesh holds of it: (V, 0).

    The table gets a gradient there too, which holds nothing: so its optimizer has a state for it on every rank.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.save_for_backward(parameter)
        return parameter.to_local().new_empty(parameter.size(0), 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.zeros_like(ctx.saved_tensors[0])


class _ScaleGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: int) -> Tensor:
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # where there is no gradient, there are no zeros either
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None
        if gradient.is_sparse:
            values = gradient._values() / ctx.divisor
            scaled = torch.sparse_coo_tensor(gradient._indices(), values, gradient.shape, check_invariants=False)
            return scaled, None
        return gradient / ctx.divisor, None


def sum_sparse(x: Tensor, group: str) -> Tensor:
    """The sum over ranks of COO tensors, uncoalesced: the entries of all ranks, one rank after the other."""
    indices, values = x._indices(), x._values()
    counts = all_gather(torch.tensor([values.size(0)], device=values.device), group).tolist()
    own = [values.size(0)] * len(counts)
    all_indices = all_to_all(torch.cat([indices.t()] * len(counts)), counts, own, group)
    all_values = all_to_all(torch.cat([values] * len(counts)), counts, own, group)
    return torch.sparse_coo_tensor(all_indices.t(), all_values, x.shape, check_invariants=False)


def all_gather_batch(x: Tensor, group: str, *, at: str | None = None, feature_dims: int = 0) -> Tensor:
    """Shard(0) -> Replicate: the rows of all ranks, in the order of the mesh.

    Args:
        x: (B, ...), of one size on all ranks. The last `feature_dims` dimensions are features; a tensor that has no
            other dimension is a batch of one row.
        group: name of the process group.
        at: module path, for errors; None if the sizes have been checked.

    Returns:
        (W*B, ...).

    Raises:
        InputError: in eager mode, on all ranks, if the sizes differ between ranks.
    """
    if x.dim() == feature_dims:
        x = x.unsqueeze(0)
    if at is not None:
        checks.check_equal_sizes(x, group, at)
    return apply(_AllGather, x, group)


def all_gather_optional(x: Tensor | None, group: str) -> Tensor | None:
    """`all_gather_batch` for an operand that has been checked and may be left out: None stays None."""
    return None if x is None else all_gather_batch(x, group)


def copy_optional(x: Tensor | None, group: str) -> Tensor | None:
    """`copy_to_columns` for an operand that may be left out: None stays None."""
    return None if x is None else copy_to_columns(x, group)


def reduce_scatter_batch(partial: Tensor, like: Tensor | None, group: str, *, feature_dims: int = 0) -> Tensor:
    """Partial -> Shard(0): (W*B, ..., F) -> (B, ..., F), summed over the ranks.

    Args:
        partial: this rank's part of the sum for all ranks' rows.
        like, group, feature_dims: as in `rearrange_columns`.
    """
    return apply(_ReduceScatter, partial, group).view(
        *leading_dims(partial, like, group, feature_dims), partial.size(-1)
    )


def rearrange_columns(
    columns: Tensor, like: Tensor | None, num_columns: int, group: str, *, feature_dims: int = 0, wire: Wire = AS_IT_IS
) -> Tensor:
    """Shard(-1) -> Shard(0): this rank's rows with all their columns.

    Args:
        columns: (W*B, ..., d), this rank's columns of all ranks' rows.
        like: this rank's input; the result has its leading dimensions (those before its last `feature_dims`). None if
            the result is (B, ..., D).
        num_columns: D.
        group: name of the process group.
        wire: in which dtypes the columns, and their gradient, travel if theirs is wider.

    Returns:
        (B, ..., D), contiguous.
    """
    shape = leading_dims(columns, like, group, feature_dims)
    return apply(_ColumnsToRows, as_matrix(columns), num_columns, group, wire).view(*shape, num_columns)


def leading_dims(x: Tensor, like: Tensor | None, group: str, feature_dims: int) -> Sequence[int]:
    """The leading dimensions of this rank's rows of `x` (W*B, ..., d): those of `like`, or (B, ...)."""
    if like is None:
        return (x.size(0) // group_size(group), *x.shape[1:-1])
    return like.shape[: like.dim() - feature_dims]


def gather_columns(columns: Tensor, num_columns: int, group: str, *, at: str, wire: Wire = AS_IT_IS) -> Tensor:
    """Shard(-1) -> Replicate: (..., d) -> (..., D) on every rank; `wire` as in `rearrange_columns`.

    Raises:
        InputError: in eager mode, on all ranks, if the replicated inputs had different sizes.
    """
    checks.check_equal_sizes(columns[..., :0], group, at)
    out = apply(_GatherColumns, as_matrix(columns), num_columns, group, wire)
    return out.view(*columns.shape[:-1], num_columns)


def rows_to_columns(x: Tensor, num_columns: int, group: str, *, at: str) -> Tensor:
    """Shard(0) -> Shard(-1): (B, ..., D) -> (W*B, ..., d), this rank's columns of all ranks' rows.

    Raises:
        InputError: in eager mode, on all ranks, if the sizes differ between ranks.
    """
    x = x.unsqueeze(0) if x.dim() == 1 else x
    checks.check_equal_sizes(x, group, at)
    columns = apply(_RowsToColumns, as_matrix(x), num_columns, group, AS_IT_IS)
    return columns.view(x.size(0) * group_size(group), *x.shape[1:-1], columns.size(1))


def slice_columns(x: Tensor, num_columns: int, group: str) -> Tensor:
    """Replicate -> Shard(-1): (..., D) -> (..., d), this rank's columns."""
    columns = apply(_SliceColumns, as_matrix(x), num_columns, group, AS_IT_IS)
    return columns.view(*x.shape[:-1], columns.size(1))


def own_rows(x: Tensor, like: Tensor | None, group: str) -> Tensor:
    """Replicate -> Shard(0): (W*B, ...) -> (B, ...), this rank's rows, in the shape that `like` begins with."""
    rows = x.size(0) // group_size(group)
    own = x.narrow(0, group_rank(group) * rows, rows)
    return own if like is None else own.reshape(*like.shape, *x.shape[x.dim() - 1 :])


def copy_to_columns(x: Tensor, group: str) -> Tensor:
    """Replicate -> Replicate, before an op on this rank's columns: the gradient is the sum over the ranks."""
    return apply(_CopyToColumns, x, group)


def all_reduce_partial(x: Tensor, group: str) -> Tensor:
    """Partial -> Replicate: the sum over the ranks."""
    return apply(_AllReduce, x, group)


def replicate_parameter(parameter: Tensor, group: str, reduction: str) -> Tensor:
    """A replicated parameter as this rank's plain tensor.

    Args:
        parameter: a DTensor with placement Replicate; a plain Parameter, equal on all ranks, whose gradient is sparse;
            or a plain tensor that is no Parameter: it went through here already, and is returned as it is.
        group: name of the process group.
        reduction: what its gradient is, over the ranks' own gradients: "mean", "sum", or "none" where every rank
            computes the whole gradient already (replicated inputs).
    """
    if not isinstance(parameter, (DTensor, torch.nn.Parameter)):
        return parameter
    if not isinstance(parameter, DTensor):
        checks.check_sparse(parameter.requires_grad, "a table with sparse=True")
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if reduction == NONE or not parameter.requires_grad:
        return local
    return scale_gradient(apply(_ReduceGradient, local, group), group, reduction)


def local_columns(parameter: Tensor, group: str, reduction: str, *, sparse: bool = False) -> Tensor:
    """This rank's shard of a parameter, as a plain tensor.

    Args:
        parameter: a DTensor that is sharded along its feature axis, on all ranks or on some; or, where its gradient is
            sparse, a plain tensor that holds this rank's columns.
        group: name of the process group.
        reduction: "mean" divides the gradient, which arrives summed over the ranks' rows, by W; "sum" and "none" do
            not.
        sparse: the gradient is sparse.

    Returns:
        The shard; without columns on a rank that holds none, yet it carries a gradient there too, so that every rank
        runs the same collectives backward.
    """
    if isinstance(parameter, DTensor):
        if parameter.device_mesh.get_coordinate() is None:
            return apply(_NoColumns, parameter)
        return scale_gradient(parameter.to_local(), group, reduction)
    if not sparse:
        raise InputError(
            describe(
                "a parameter that is sharded",
                f"a plain tensor of shape {tuple(parameter.shape)} stands in its place",
                "a DTensor with the placement of the parameter",
                "Make it of the sharded model's own: {name: f(p) for name, p in model.named_parameters()}.",
            )
        )
    if parameter.size(1) == 0:
        return parameter.new_zeros(parameter.shape).requires_grad_(parameter.requires_grad)
    return scale_gradient(parameter, group, reduction)


def scale_gradient(x: Tensor, group: str, reduction: str) -> Tensor:
    """`x`; for the reduction "mean" its gradient is divided by W."""
    if reduction != MEAN or not x.requires_grad:
        return x
    return apply(_ScaleGradient, x, group_size(group))


def as_matrix(columns: Tensor) -> Tensor:
    """(..., d) -> (rows, d), (d,) -> (1, d); `reshape(-1, d)` cannot infer the rows where d is 0."""
    return columns.unsqueeze(0) if columns.dim() == 1 else columns.flatten(0, -2)


def apply(function: type[Function], *args: Any) -> Tensor:
    """`function.apply`, which torch leaves untyped."""
    out: Tensor = function.apply(*args)
    return out
