"""Redistributions of many activations at once: one collective for each dtype, however many there are.

    function              from        -> to          forward      backward
    all_gather_together   Shard(0)    -> Replicate   all_gather   reduce_scatter of those with a gradient
    rearrange_together    Shard(-1)   -> Shard(0)    all_to_all   all_to_all
    replicate_together    parameters, unchanged      none         all_reduce

Each computes what `redistribute` computes for one, to the last bit. What travels is packed by destination: for rank 0
its part of the first, of the second, ...; for rank 1, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from passes.layout import chunk_sizes
from passes.ops import checks, redistribute
from passes.ops.collectives import group_rank, group_size
from passes.ops.jagged import exchange_jagged


class _ReduceGradients(Function):
    """The tensors as they are; their gradients are summed over the ranks, all in one collective."""

    @staticmethod
    def forward(ctx: Any, group: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # what a loss does not depend on has no gradient
        ctx.group, ctx.like = group, [(x.shape, x.dtype, x.device) for x in tensors]
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if all(gradient is None for gradient in gradients):
            return None, *gradients
        # All travel, so that the message has one size on all ranks.
        whole = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, ctx.like, strict=True)
        ]
        sums = list(gradients)
        for places in _by_kind(whole):
            flat = torch.cat([whole[place].reshape(-1) for place in places])
            pieces = redistribute.all_reduce_partial(flat, ctx.group).split([whole[place].numel() for place in places])
            for place, piece in zip(places, pieces, strict=True):
                sums[place] = None if gradients[place] is None else piece.view(whole[place].shape)
        return None, *sums


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
    world = group_size(group)
    gathered: list[Tensor | None] = [None] * len(rows)
    for places in _by_kind(rows):
        chosen = [x for place in places if (x := rows[place]) is not None]
        sizes = [x.numel() for x in chosen]
        flat = redistribute.all_gather_batch(torch.cat([x.reshape(-1) for x in chosen]), group)
        pieces = flat.view(world, sum(sizes)).split(sizes, 1)
        for place, x, piece in zip(places, chosen, pieces, strict=True):
            gathered[place] = piece.reshape(world * x.size(0), *x.shape[1:])
    return gathered


def rearrange_together(
    columns: Sequence[Tensor],
    likes: Sequence[Tensor | None],
    num_columns: Sequence[int],
    group: str,
    *,
    feature_dims: Sequence[int],
) -> list[Tensor]:
    """`rearrange_columns` of each: this rank's columns of all ranks' rows -> this rank's rows with all columns.

    Args:
        columns: (W*B, ..., d); B, the rest of the shape, and d may differ from tensor to tensor.
        likes, num_columns, feature_dims: for each, as in `rearrange_columns`.
        group: name of the process group.

    Returns:
        For each (B, ..., D), contiguous.
    """
    world = group_size(group)
    results: list[Tensor] = list(columns)
    for places in _by_kind(columns):
        chosen = [redistribute.as_matrix(columns[place]) for place in places]
        matrices = _rows_with_all_columns(chosen, [num_columns[place] for place in places], group)
        for place, matrix in zip(places, matrices, strict=True):
            like, x = likes[place], columns[place]
            leading = (
                (x.size(0) // world, *x.shape[1:-1]) if like is None else like.shape[: like.dim() - feature_dims[place]]
            )
            results[place] = matrix.view(*leading, num_columns[place])
    return results


def replicate_together(parameters: Sequence[Tensor], group: str, reduction: str) -> list[Tensor]:
    """`replicate_parameter` of each; their gradients, which are dense, travel in one all_reduce for each dtype."""
    local = [redistribute.replicate_parameter(x, group, redistribute.NONE) for x in parameters]
    if reduction == redistribute.NONE:
        return local
    # One that is a plain tensor already had its gradient reduced where it was made one.
    places = [place for place, x in enumerate(parameters) if isinstance(x, DTensor) and x.requires_grad]
    if places:
        reduced: Any = _ReduceGradients.apply(group, *(local[place] for place in places))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for place, x in zip(places, reduced, strict=True):
            local[place] = redistribute.scale_gradient(x, group, reduction)
    return local


def _rows_with_all_columns(matrices: Sequence[Tensor], num_columns: Sequence[int], group: str) -> list[Tensor]:
    """For each (W*B, d) -> (B, D)."""
    world, rank = group_size(group), group_rank(group)
    sizes = [chunk_sizes(columns, world) for columns in num_columns]
    rows = [x.size(0) // world for x in matrices]
    packed = torch.cat(
        [x.reshape(world, n * owned[rank]) for x, n, owned in zip(matrices, rows, sizes, strict=True)], 1
    )
    blocks = [[n * owned[source] for n, owned in zip(rows, sizes, strict=True)] for source in range(world)]
    receive = [sum(block) for block in blocks]
    came = exchange_jagged(packed.flatten(), receive, [packed.size(1)] * world, sum(receive), group)
    if all(len(set(owned)) == 1 for owned in sizes):
        by_source = came.view(world, receive[0]).split(blocks[0], 1)
        return [
            piece.view(world, n, owned[0]).transpose(0, 1).reshape(n, columns).contiguous()
            for piece, n, owned, columns in zip(by_source, rows, sizes, num_columns, strict=True)
        ]
    pieces = came.split([size for block in blocks for size in block])
    return [
        torch.cat(
            [pieces[source * len(rows) + place].view(n, owned[source]) for source in range(world)],
            1,
        )
        for place, (n, owned) in enumerate(zip(rows, sizes, strict=True))
    ]


def _by_kind(tensors: Iterable[Tensor | None]) -> list[list[int]]:
    """The places of the tensors of one dtype, those with a gradient apart: each kind is a message."""
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for place, x in enumerate(tensors):
        if x is not None:
            kinds.setdefault((x.dtype, x.requires_grad), []).append(place)
    return list(kinds.values())
