"""Bags of several tables, pooled at once: `stacked.embedding` for `embedding_bag`. The letters are those of `stacked`.

embedding_bag       ids (W*N,), of (B, L) per table     -> (W*R, d)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from passes.errors import InputError, describe
from passes.ops import checks, lookup, redistribute
from passes.ops.collectives import group_size
from passes.ops.stacked import Presence, Stack, check_rows, in_stack, present


class _Join(Function):
    """(W*R_t, d) of each table -> (W*R, d), one table's results after another's for each rank."""

    @staticmethod
    def forward(ctx: Any, world: int, presence: Presence, *columns: Tensor) -> Tensor:
        ctx.world, ctx.presence, ctx.rows = world, presence, [x.size(0) // world for x in columns]
        width = columns[0].size(1)
        return torch.cat([x.view(world, x.size(0) // world, width) for x in columns], 1).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        by_rank = gradient.view(ctx.world, sum(ctx.rows), gradient.size(1))
        pieces = [piece.flatten(0, 1) for piece in by_rank.split(ctx.rows, 1)]
        return None, None, *present(pieces, ctx.presence)


class _Pooled(Function):
    """`F.embedding_bag` by sum or mean, whose gradient is written so that Inductor makes one loop of it.

    Of bags of 26 tables (20,000, 32), 213,000 ids, on a CPU with one thread, the gradient takes 33 ms, of which 26 are
    for the memory; torch's own kernel takes 47 ms. 26 calls of it take 60 ms, and as long to compile as they are many.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, world: int, shapes: list[torch.Size], mode: str) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.world, ctx.shapes, ctx.mode, ctx.rows = world, shapes, mode, weight.size(0)
        return _pool(weight, ids, world, shapes, mode)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        by_rank = gradient.view(ctx.world, -1, gradient.size(1))
        pieces = []
        for piece, (bags, length) in _by_length(by_rank, ctx.shapes):
            own = piece / length if ctx.mode == "mean" else piece
            pieces.append(own.unsqueeze(2).expand(ctx.world, bags, length, gradient.size(1)).flatten(1, 2))
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        table = gradient.new_zeros(ctx.rows, gradient.size(1))
        return table.index_put((ids,), whole, accumulate=True), None, None, None, None


def _by_length(by_rank: Tensor, shapes: Sequence[torch.Size]) -> list[tuple[Tensor, tuple[int, int]]]:
    """(W, R, d) in the parts whose bags have one length: each (W, R', d), and R' and the length."""
    bags = [shape[0] for shape in shapes]
    if all(shape[1] == shapes[0][1] for shape in shapes):
        return [(by_rank, (sum(bags), shapes[0][1]))]
    return [(piece, (shape[0], shape[1])) for piece, shape in zip(by_rank.split(bags, 1), shapes, strict=True)]


def _pool(weight: Tensor, ids: Tensor, world: int, shapes: Sequence[torch.Size], mode: str) -> Tensor:
    """One `F.embedding_bag` of ids (W, N), rows of the stack."""
    if all(shape == shapes[0] for shape in shapes):
        bags, length = world * len(shapes) * shapes[0][0], shapes[0][1]
        return F.embedding_bag(ids.view(bags, length), weight, mode=mode)
    starts, total = [], 0
    for bags, length in shapes:
        starts.append(torch.arange(bags, device=ids.device) * length + total)
        total = total + bags * length
    ranks = torch.arange(world, device=ids.device).unsqueeze(1) * total
    offsets = (torch.cat(starts) + ranks).flatten().to(ids.dtype)
    return F.embedding_bag(ids.flatten(), weight, offsets, mode=mode)


def embedding_bag(
    ids: Tensor,
    stack: Stack,
    likes: Sequence[Tensor],
    group: str,
    *,
    at: Sequence[str],
    rows: Sequence[int],
    mode: str = "mean",
) -> Tensor:
    """`F.embedding_bag` of each table on this rank's columns, one table's results after another's for each rank.

    Args:
        likes: this rank's ids, (B, L) for each table.
        ids, stack, group, at, rows: as in `stacked.embedding`.
        mode: as in torch.

    Returns:
        (W*R, d).

    Raises:
        IdRangeError: in eager mode, on all ranks, if an id is not a row of its table.
        InputError: if a table's ids have not two dimensions.
    """
    for x, where in zip(likes, at, strict=True):
        if x.dim() != 2:
            fact = f"the ids have {x.dim()} dimensions, and there are no offsets"
            raise InputError(describe(where, fact, "ids of two dimensions, a bag in each row", "Pass offsets."))
    world, sizes = group_size(group), [x.numel() for x in likes]
    if checks.is_readable(ids):
        check_rows(ids.view(world, sum(sizes)), sizes, at, rows)
        columns = _bags_of_each(ids, stack, likes, world, mode)
    else:
        moved = in_stack(ids, stack, sizes, group, at, rows)
        weight, shapes = lookup.without_empty(stack.table), [x.shape for x in likes]
        if ids.device.type == "cpu" and mode != "max" and torch.is_grad_enabled() and weight.requires_grad:
            pooled = redistribute.apply(_Pooled, weight, moved, world, shapes, mode)
        else:
            pooled = _pool(weight, moved, world, shapes, mode)
        columns = pooled[:, : stack.table.size(1)]
    return redistribute.scale_gradient(columns, group, stack.reduction)


def _bags_of_each(ids: Tensor, stack: Stack, likes: Sequence[Tensor], world: int, mode: str) -> Tensor:
    """`embedding_bag`, a call for each table.

    torch sorts the ids of a call to add up gradients, and leaves open in which order it adds those of one id: only the
    same call gives the same last bit.
    """
    sizes = [x.numel() for x in likes]
    pieces = ids.view(world, sum(sizes)).split(sizes, 1)
    columns = []
    for piece, shard, x in zip(pieces, stack.shards, likes, strict=True):
        bags = piece.reshape(world * x.size(0), x.size(1))
        columns.append(F.embedding_bag(bags, lookup.without_empty(shard), mode=mode)[:, : shard.size(1)])
    if stack.presence is None or not (torch.is_grad_enabled() and any(x.requires_grad for x in columns)):
        by_rank = [x.view(world, x.size(0) // world, x.size(1)) for x in columns]
        return torch.cat(by_rank, 1).flatten(0, 1)
    joined: Tensor = _Join.apply(world, stack.presence, *columns)  # type: ignore[no-untyped-call]  # as torch leaves it
    return joined
