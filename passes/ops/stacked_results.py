"""The results of a stacked lookup, R rows of T tables, one table's after another's, for each table or side by side.

results_of_ids      (R, D)   -> (B, ..., D) for each table
results_of_bags     (R, D)   -> (B, D) for each table
cat_bags            (R, D)   -> (B, ... + T*D + ...)
stack_bags          (R, D)   -> (B, ... + T + ..., D)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from passes.ops import together
from passes.ops.stacked import Presence, Stack


class _Results(Function):
    """(R, D) -> for each table its results, each a tensor of its own, which may be changed in place."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, presence: Presence | None, group: str, counts: list[int]) -> Any:
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)
        pieces = _apart(rows, counts)
        ctx.group, ctx.presence, ctx.shapes = group, presence, [piece.shape for piece in pieces]
        return pieces

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        places, whole = together.present(gradients, ctx.shapes, ctx.group)
        like = whole[0]
        found = dict(zip(places, whole, strict=True))
        if ctx.presence is not None:
            ctx.presence.absent = frozenset(range(len(gradients))) - found.keys()
        pieces = [found[place] if place in found else like.new_zeros(shape) for place, shape in enumerate(ctx.shapes)]
        return torch.cat(pieces), None, None, None


def results_of_ids(rows: Tensor, likes: Sequence[Tensor], stack: Stack, group: str) -> list[Tensor]:
    """(R, D) -> for each table (B, ..., D), contiguous; `likes` are this rank's ids."""
    counts = [x.numel() for x in likes]
    return [x.view(*like.shape, x.size(1)) for x, like in zip(_split(rows, counts, stack, group), likes, strict=True)]


def results_of_bags(rows: Tensor, likes: Sequence[Tensor], stack: Stack, group: str) -> list[Tensor]:
    """(R, D) -> for each table (B, D), contiguous; `likes` are this rank's ids, (B, L)."""
    return list(_split(rows, [x.size(0) for x in likes], stack, group))


def _split(rows: Tensor, counts: list[int], stack: Stack, group: str) -> Sequence[Tensor]:
    if not (torch.is_grad_enabled() and rows.requires_grad):
        return _apart(rows, counts)
    found: tuple[Tensor, ...] = _Results.apply(rows, stack.presence, group, counts)  # type: ignore[no-untyped-call]  # as torch leaves it
    return found


def _apart(rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """The parts of `rows`. Through `data`, so that none counts the changes of another as its own."""
    return tuple(piece.data for piece in rows.split(list(counts)))


def cat_bags(before: Sequence[Tensor], rows: Tensor, after: Sequence[Tensor], likes: Sequence[Tensor]) -> Tensor:
    """`torch.cat([*before, *results_of_bags(rows, likes, ...), *after], 1)`, in one copy of the results."""
    bags = _side_by_side(rows, likes)
    if not before and not after:
        return torch.cat([bags], 1).flatten(1)  # a copy, as of any `cat`
    return torch.cat([*before, bags.flatten(1), *after], 1)


def stack_bags(before: Sequence[Tensor], rows: Tensor, after: Sequence[Tensor], likes: Sequence[Tensor]) -> Tensor:
    """`torch.stack([*before, *results_of_bags(rows, likes, ...), *after], 1)`, in one copy of the results."""
    one_by_one = [[x.unsqueeze(1) for x in others] for others in (before, after)]
    return torch.cat([*one_by_one[0], _side_by_side(rows, likes), *one_by_one[1]], 1)


def _side_by_side(rows: Tensor, likes: Sequence[Tensor]) -> Tensor:
    """(R, D) -> (B, T, D), a view. Tables of different B are torch's error, as in the model."""
    counts = [x.size(0) for x in likes]
    if any(count != counts[0] for count in counts):
        return torch.stack(rows.split(counts), 1)
    return rows.view(len(counts), counts[0], rows.size(1)).transpose(0, 1)
