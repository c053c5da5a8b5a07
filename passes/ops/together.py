"""Redistributions of many activations at once: one collective for each dtype, however many there are.

    function              from        -> to          forward          backward
    all_gather_together   Shard(0)    -> Replicate   all_gather       reduce_scatter of those with a gradient
    rearrange_together    Shard(-1)   -> Shard(0)    all_to_all       all_to_all
    scatter_together      Partial     -> Shard(0)    reduce_scatter   all_gather
    replicate_together    parameters, unchanged      none             all_reduce

Each computes what `redistribute` computes for one, to the last bit.

What no rank's loss depends on gets no gradient, as where each travels by itself. In eager mode a small gather tells
which that is; the compiler gives everything in its graph a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from passes.layout import AS_IT_IS, Wire
from passes.ops import checks, redistribute
from passes.ops.collectives import all_gather, group_size, reduce_scatter
from passes.ops.columns import columns_for_rows, rows_for_columns


class _GatherTogether(Function):
    """For each (B, ...) -> (W*B, ...)."""

    @staticmethod
    def forward(ctx: Any, group: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        _keep_absent(ctx)
        ctx.group, ctx.shapes = group, [x.shape for x in tensors]
        return _rows_of_all(group, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        world = group_size(ctx.group)
        shapes = [(world * shape[0], *shape[1:]) for shape in ctx.shapes]
        places, whole = present(gradients, shapes, ctx.group)
        own = _run(_ScatterTogether, _own_sums, ctx.group, *whole)
        return None, *_in_places(len(gradients), places, own)


class _ScatterTogether(Function):
    """For each (W*B, ...) -> (B, ...), summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, group: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        _keep_absent(ctx)
        ctx.group, ctx.shapes = group, [x.shape for x in tensors]
        return _own_sums(group, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        shapes = [(shape[0] // group_size(ctx.group), *shape[1:]) for shape in ctx.shapes]
        places, whole = present(gradients, shapes, ctx.group)
        rows = _run(_GatherTogether, _rows_of_all, ctx.group, *whole)
        return None, *_in_places(len(gradients), places, rows)


class _RearrangeTogether(Function):
    """For each (W*B, d) -> (B, D)."""

    @staticmethod
    def forward(
        ctx: Any, group: str, num_columns: tuple[int, ...], wire: Wire, *matrices: Tensor
    ) -> tuple[Tensor, ...]:
        _keep_absent(ctx)
        world = group_size(group)
        ctx.group, ctx.num_columns, ctx.rows = group, num_columns, [x.size(0) // world for x in matrices]
        ctx.wire = wire
        return _to_rows(group, num_columns, wire, *matrices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        shapes = list(zip(ctx.rows, ctx.num_columns, strict=True))
        places, whole = present(gradients, shapes, ctx.group)
        widths = tuple(ctx.num_columns[place] for place in places)
        found = _run(_SpreadTogether, _to_columns, ctx.group, widths, ctx.wire[::-1], *whole)
        return None, None, None, *_in_places(len(gradients), places, found)


class _SpreadTogether(Function):
    """For each (B, D) -> (W*B, d)."""

    @staticmethod
    def forward(
        ctx: Any, group: str, num_columns: tuple[int, ...], wire: Wire, *matrices: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.num_columns, ctx.wire = group, num_columns, wire
        return _to_columns(group, num_columns, wire, *matrices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = _run(_RearrangeTogether, _to_rows, ctx.group, ctx.num_columns, ctx.wire[::-1], *gradients)
        return None, None, None, *found


class _ReduceGradients(Function):
    """The tensors as they are; their gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, group: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        _keep_absent(ctx)
        ctx.group, ctx.shapes = group, [x.shape for x in tensors]
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        places, whole = present(gradients, ctx.shapes, ctx.group)
        flat = redistribute.all_reduce_partial(torch.cat([x.reshape(-1) for x in whole]), ctx.group)
        sums = flat.split([x.numel() for x in whole])
        return None, *_in_places(len(gradients), places, sums, ctx.shapes)


def _keep_absent(ctx: Any) -> None:
    """Asks for None, not zeros, where there is no gradient. Dynamo, which always has one, knows no such request."""
    if not torch.compiler.is_compiling():
        ctx.set_materialize_grads(False)


def present(
    gradients: Sequence[Tensor | None], shapes: Sequence[Sequence[int]], group: str
) -> tuple[list[int], list[Tensor]]:
    """The places at which some rank has a gradient, and this rank's gradients there, zeros where it has none."""
    like = next(gradient for gradient in gradients if gradient is not None)
    places = list(range(len(gradients)))
    if checks.is_readable(like):
        own = torch.tensor([[gradient is not None for gradient in gradients]], device=like.device)
        anywhere = all_gather(own.to(torch.uint8), group).amax(0).tolist()
        places = [place for place, present in enumerate(anywhere) if present]
    whole = [like.new_zeros(shapes[place]) if (x := gradients[place]) is None else x for place in places]
    return places, whole


def _in_places(
    number: int, places: Sequence[int], found: Iterable[Tensor], shapes: Sequence[Sequence[int]] | None = None
) -> list[Tensor | None]:
    """What was found at its places among Nones."""
    results: list[Tensor | None] = [None] * number
    for place, x in zip(places, found, strict=True):
        results[place] = x if shapes is None else x.view(shapes[place])
    return results


def _run(function: type[Function], plain: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
    """`function.apply`, or where nothing has a gradient what its forward computes.

    Without gradients Dynamo goes by the number of arguments to tell whether a forward takes a `ctx`.
    """
    if not (torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)):
        return plain(*args)
    results: tuple[Tensor, ...] = function.apply(*args)
    return results


def all_gather_together(
    tensors: Sequence[Tensor | None], group: str, *, at: Sequence[str | None], feature_dims: Sequence[int]
) -> list[Tensor | None]:
    """`all_gather_batch` of each tensor: (B, ...) -> (W*B, ...). None, for an operand that is left out, stays None.

    Args:
        tensors: B and the rest of the shape may differ from tensor to tensor, not from rank to rank.
        group: name of the process group.
        at: module paths, for errors; None for a tensor that has been checked.
        feature_dims: as in `all_gather_batch`.

    Raises:
        InputError: in eager mode, on all ranks, if the sizes differ between ranks.
    """
    operands = zip(tensors, feature_dims, strict=True)
    rows = [x.unsqueeze(0) if x is not None and x.dim() == dims else x for x, dims in operands]
    checks.check_inputs([(x, where) for x, where in zip(rows, at, strict=True) if x is not None and where], group)
    gathered: list[Tensor | None] = [None] * len(rows)
    for places in _by_kind(rows):
        chosen = [x for place in places if (x := rows[place]) is not None]
        for place, x in zip(places, _run(_GatherTogether, _rows_of_all, group, *chosen), strict=True):
            gathered[place] = x
    return gathered


def rearrange_together(
    columns: Sequence[Tensor],
    likes: Sequence[Tensor | None],
    num_columns: Sequence[int],
    group: str,
    *,
    feature_dims: Sequence[int],
    wire: Wire = AS_IT_IS,
) -> list[Tensor]:
    """`rearrange_columns` of each: this rank's columns of all ranks' rows -> this rank's rows with all columns.

    Args:
        columns: (W*B, ..., d); B, the rest of the shape, and d may differ from tensor to tensor.
        likes, num_columns, feature_dims: for each, as in `rearrange_columns`.
        group: name of the process group.
        wire: for all, as in `rearrange_columns`.

    Returns:
        For each (B, ..., D), contiguous.
    """
    results: list[Tensor] = list(columns)
    for places in _by_kind(columns):
        chosen = [redistribute.as_matrix(columns[place]) for place in places]
        widths = tuple(num_columns[place] for place in places)
        matrices = _run(_RearrangeTogether, _to_rows, group, widths, wire, *chosen)
        for place, matrix in zip(places, matrices, strict=True):
            like, x = likes[place], columns[place]
            leading = redistribute.leading_dims(x, like, group, feature_dims[place])
            results[place] = matrix.view(*leading, num_columns[place])
    return results


def scatter_together(
    partials: Sequence[Tensor], likes: Sequence[Tensor | None], group: str, *, feature_dims: Sequence[int]
) -> list[Tensor]:
    """`reduce_scatter_batch` of each: (W*B, ..., F) -> (B, ..., F), summed over the ranks.

    Args:
        partials: B and the rest of the shape may differ from tensor to tensor, not from rank to rank.
        likes, feature_dims: for each, as in `reduce_scatter_batch`.
        group: name of the process group.
    """
    results: list[Tensor] = list(partials)
    for places in _by_kind(partials):
        sums = _run(_ScatterTogether, _own_sums, group, *(partials[place] for place in places))
        for place, x in zip(places, sums, strict=True):
            leading = redistribute.leading_dims(partials[place], likes[place], group, feature_dims[place])
            results[place] = x.view(*leading, x.size(-1))
    return results


def replicate_together(parameters: Sequence[Tensor], group: str, reduction: str) -> list[Tensor]:
    """`replicate_parameter` of each; their gradients, which are dense, travel in one all_reduce for each dtype."""
    local = [redistribute.replicate_parameter(x, group, redistribute.NONE) for x in parameters]
    if reduction == redistribute.NONE:
        return local
    # One that is a plain tensor already had its gradient reduced where it was made one.
    trained = [x if isinstance(x, DTensor) and x.requires_grad else None for x in parameters]
    for places in _by_kind(trained):
        reduced = _run(_ReduceGradients, _as_they_are, group, *(local[place] for place in places))
        for place, x in zip(places, reduced, strict=True):
            local[place] = redistribute.scale_gradient(x, group, reduction)
    return local


def _rows_of_all(group: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """For each (B, ...) -> (W*B, ...), without a gradient."""
    world, sizes = group_size(group), [x.numel() for x in tensors]
    flat = all_gather(torch.cat([x.reshape(-1) for x in tensors]), group)
    pieces = flat.view(world, sum(sizes)).split(sizes, 1)
    return tuple(piece.reshape(world * x.size(0), *x.shape[1:]) for x, piece in zip(tensors, pieces, strict=True))


def _own_sums(group: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """For each (W*B, ...) -> (B, ...), the sum over the ranks of this rank's rows, without a gradient."""
    world = group_size(group)
    rows = [x.reshape(world, x.numel() // world) for x in tensors]
    pieces = reduce_scatter(torch.cat(rows, 1).flatten(), group).split([x.size(1) for x in rows])
    # Copies: torch refuses to change in place what a Function has made a view.
    return tuple(p.view(x.size(0) // world, *x.shape[1:]).clone() for x, p in zip(tensors, pieces, strict=True))


def _to_rows(group: str, num_columns: tuple[int, ...], wire: Wire, *matrices: Tensor) -> tuple[Tensor, ...]:
    return columns_for_rows(group, num_columns, *matrices, dtype=wire[0])


def _to_columns(group: str, num_columns: tuple[int, ...], wire: Wire, *matrices: Tensor) -> tuple[Tensor, ...]:
    return rows_for_columns(group, num_columns, *matrices, dtype=wire[0])


def _as_they_are(group: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    del group
    return tensors


def _by_kind(tensors: Iterable[Tensor | None]) -> list[list[int]]:
    """The places of the tensors of one dtype, those with a gradient apart: each kind is a message."""
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for place, x in enumerate(tensors):
        if x is not None:
            kinds.setdefault((x.dtype, x.requires_grad), []).append(place)
    return list(kinds.values())
