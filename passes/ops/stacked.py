"""Lookups of several tables as one: a lookup on a stack, the rows of all of them.

T tables of one width, table t with V_t rows; V rows in all, of which this rank holds d columns. Of each rank N ids of
all tables one after the other, which give R results: a row for each id, or for each bag.

    pack_ids            ids (B, ...) of each table          -> (N,)
    pack_gathered       gathered ids (W*B, ...) of each     -> (W*N,)
    stack_tables        the shards (V_t, d)                 -> (V, d), and the first row of each table
    embedding           ids (W*N,)                          -> (W*R, d)

`stacked_bags` looks up bags, `stacked_results` takes what comes back apart.

The shards of a stack are views of its rows: no step copies a table, and the gradients are views of one (V, d). Whoever
gives a parameter other storage has to stack again (`restack`). Eager mode looks where the shards are, and stacks a copy
if they are elsewhere; a compiled graph asks the operator `autoshard::first_rows`, which raises.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack

from passes.errors import InputError, describe
from passes.ops import checks, lookup, redistribute
from passes.ops.collectives import group_size

_FUSED = 6  # two less than torch._inductor.config.max_pointwise_cat_inputs


class Presence:
    """The tables of a stack that no rank's loss depends on, which get no gradient; a backward tells another."""

    absent: frozenset[int] = frozenset()


class Stack(NamedTuple):
    """Tables that are looked up together.

    Attributes:
        table: (V, d), the rows of all.
        first: (T,), int64, the first row of each.
        shards: (V_t, d) of each.
        reduction: of the shards' gradients, as in `local_columns`. It is the results' gradient that is divided, which
            is smaller than that of the tables.
        presence: in eager mode.
    """

    table: Tensor
    first: Tensor
    shards: list[Tensor]
    reduction: str
    presence: Presence | None


def is_stacked(table: Tensor, shards: Sequence[Tensor]) -> bool:
    """True if the shards are the rows of the table, one after the other, and all of them."""
    place = table.data_ptr()
    for shard in shards:
        if (shard.dtype, shard.device, shard.size(1)) != (table.dtype, table.device, table.size(1)):
            return False
        if shard.numel() and (shard.data_ptr() != place or not shard.is_contiguous()):
            return False
        place += shard.numel() * shard.itemsize
    return sum(shard.size(0) for shard in shards) == table.size(0)


def restack(table: Tensor, parameters: Sequence[DTensor]) -> Tensor:
    """The stack of the parameters' shards, which become views of its rows.

    Args:
        table: their stack of before; it is returned if it still is that.
        parameters: DTensors of one width, dtype and device.

    Raises:
        InputError: if the dtypes or devices differ.
    """
    with torch.no_grad():
        shards = [parameter.to_local() for parameter in parameters]
        rows = sum(shard.size(0) for shard in shards)
        if not checks.is_readable(shards[0]):  # there is no memory to share
            return shards[0].new_empty(rows, shards[0].size(1))
        if is_stacked(table, shards):
            return table
        _require_one_kind(shards)
        made = torch.cat(shards)
        start = 0
        for parameter, shard in zip(parameters, shards, strict=True):
            parameter._local_tensor = _alias(made.narrow(0, start, shard.size(0)))
            start += shard.size(0)
    return made


def _alias(rows: Tensor) -> Tensor:
    """The same memory as a storage of its own.

    What a view is to torch would show: in checkpoints, which save storages, and in DTensor, which cannot copy views.
    """
    return from_dlpack(rows) if rows.numel() else rows.clone()


def _require_one_kind(shards: Sequence[Tensor]) -> None:
    kinds = sorted({f"{shard.dtype} on {shard.device}" for shard in shards})
    if len(kinds) > 1:
        raise InputError(
            describe(
                "tables that are looked up together",
                f"they are of {', '.join(kinds)}",
                "one dtype and one device",
                "Convert or move the whole model, not a part of it.",
            )
        )


@torch.library.custom_op("autoshard::first_rows", mutates_args=())
def _first_rows(first: Tensor, table: Tensor, shards: list[Tensor]) -> Tensor:
    """A copy of `first`. The lookup adds it to its ids, so that no compiler leaves out the check."""
    if not is_stacked(table, shards):
        raise InputError(
            describe(
                "tables that are looked up together",
                "the values of one were replaced by others after the model was sharded",
                "values in the storage that all of them share",
                "Load and convert the whole model, or call the model once without torch.compile: that puts them there.",
            )
        )
    return first.clone()


@_first_rows.register_fake
def _(first: Tensor, table: Tensor, shards: list[Tensor]) -> Tensor:
    return torch.empty_like(first)


class _StackTables(Function):
    """The stack as it is; the gradient of each shard is its rows of the stack's."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, first: Tensor, presence: Presence | None, *shards: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.presence, ctx.rows = presence, [shard.size(0) for shard in shards]
        found = _found(first, table, shards)
        ctx.mark_non_differentiable(found)
        return table.view_as(table), found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        return None, None, None, *present(gradient.split(ctx.rows), ctx.presence)


def present(gradients: Sequence[Tensor], presence: Presence | None) -> list[Tensor | None]:
    """The gradients of the tables of a stack, None for those that get none."""
    absent = frozenset() if presence is None else presence.absent
    return [None if place in absent else gradient for place, gradient in enumerate(gradients)]


def _found(first: Tensor, table: Tensor, shards: Sequence[Tensor]) -> Tensor:
    """The first row of each table; in eager mode it is known already that they are there."""
    return _first_rows(first, table, list(shards)) if torch.compiler.is_compiling() else first


def stack_tables(table: Tensor, first: Tensor, parameters: Sequence[Tensor], group: str, reduction: str) -> Stack:
    """The shards of several parameters as one tensor.

    Args:
        table: (V, d), what the shards are views of.
        first: (T,), int64, the first row of each.
        parameters: T DTensors; or what `torch.func.functional_call` puts in their place, which is copied.
        group, reduction: as in `local_columns`.
    """
    shards = [redistribute.local_columns(parameter, group, redistribute.NONE) for parameter in parameters]
    presence = None if torch.compiler.is_compiling() else Presence()
    own = all(isinstance(parameter, nn.Parameter) for parameter in parameters)
    if not own or (checks.is_readable(table) and not is_stacked(table, shards)):
        _require_one_kind(shards)
        return Stack(torch.cat(shards), first, shards, reduction, presence)
    if not (torch.is_grad_enabled() and any(shard.requires_grad for shard in shards)):
        return Stack(table, _found(first, table, shards), shards, reduction, presence)
    stacked, found = _StackTables.apply(table, first, presence, *shards)  # type: ignore[no-untyped-call]  # as torch leaves it
    return Stack(stacked, found, shards, reduction, presence)


def pack_ids(ids: Sequence[Tensor], group: str, *, at: Sequence[str | None]) -> Tensor:
    """This rank's ids of several tables, one table's after another's: (B, ...) for each -> (N,).

    Args:
        ids: as they travel; the shapes may differ from table to table, not from rank to rank.
        group: name of the process group.
        at: module paths, for errors; None for ids that have been checked.

    Raises:
        InputError: in eager mode, on all ranks, if the sizes differ between ranks.
    """
    rows = [x.unsqueeze(0) if checks.is_strided(x) and x.dim() == 0 else x for x in ids]
    checks.check_inputs([(x, where) for x, where in zip(rows, at, strict=True) if where], group)
    for x, where in zip(ids, at, strict=True):
        checks.check_id_dtype(x, where or "a lookup")
    return _cat([x.reshape(-1) for x in ids])


def _cat(pieces: list[Tensor]) -> Tensor:
    """`torch.cat` of integers.

    For a GPU, Inductor fuses a cat of up to eight pieces with what is computed of it, and else makes a kernel for each
    piece. So the whole is a sum of cats of six pieces among zeros, all of one size: one kernel. On the CPU a loop for
    each piece is what is fast.
    """
    if len(pieces) <= _FUSED or not torch.compiler.is_compiling() or pieces[0].device.type == "cpu":
        return torch.cat(pieces)
    sizes = [piece.numel() for piece in pieces]
    parts = []
    for start in range(0, len(pieces), _FUSED):
        end = start + _FUSED
        before, after = (pieces[0].new_zeros(sum(others)) for others in (sizes[:start], sizes[end:]))
        parts.append(torch.cat([before, *pieces[start:end], after]))
    return functools.reduce(torch.add, parts)


def pack_gathered(ids: Sequence[Tensor], group: str, *, at: Sequence[str]) -> Tensor:
    """`pack_ids` of ids that were gathered for each table by itself: (W*B, ...) for each -> (W*N,)."""
    for x, where in zip(ids, at, strict=True):
        checks.check_id_dtype(x, where)
    world = group_size(group)
    return torch.cat([x.reshape(world, x.numel() // world) for x in ids], 1).flatten()


def embedding(
    ids: Tensor, stack: Stack, likes: Sequence[Tensor], group: str, *, at: Sequence[str], rows: Sequence[int]
) -> Tensor:
    """`F.embedding` of each table on this rank's columns, one table's results after another's for each rank.

    Args:
        ids: (W*N,), the same on all ranks.
        stack: of `stack_tables`.
        likes: this rank's ids, for their shapes.
        group: name of the process group.
        at: module paths, for errors.
        rows: V_t.

    Returns:
        (W*N, d).

    Raises:
        IdRangeError: in eager mode, on all ranks, if an id is not a row of its table.
    """
    table = stack.table
    moved = in_stack(ids, stack, [x.numel() for x in likes], group, at, rows)
    columns = F.embedding(moved.flatten(), lookup.without_empty(table))[:, : table.size(1)]
    return redistribute.scale_gradient(columns, group, stack.reduction)


def in_stack(
    ids: Tensor, stack: Stack, sizes: Sequence[int], group: str, at: Sequence[str], rows: Sequence[int]
) -> Tensor:
    """Ids of rows of the tables -> of rows of the stack, (W, N).

    Args:
        sizes: how many ids of each table a rank has.
        ids, stack, group, at, rows: as in `embedding`.
    """
    table, first = stack.table, stack.first
    equal = all(size == sizes[0] for size in sizes)
    # (W, T, N/T), or a view for each table
    by_table = ids.view(group_size(group), len(sizes), sizes[0]) if equal else None
    by_rank = ids.view(group_size(group), sum(sizes))
    check_rows(by_rank, sizes, at, rows)
    first = first if table.size(0) >= 2**31 else first.to(ids.dtype)
    if by_table is not None:
        moved = by_table + first.unsqueeze(1)
        if not checks.is_readable(ids):
            ends = torch.cat([first[1:], first.new_full((1,), table.size(0))])
            moved = torch.where((by_table >= 0) & (moved < ends.unsqueeze(1)), moved, table.size(0))
        return moved.view(by_rank.shape)
    moved_pieces = []
    for piece, start, size in zip(by_rank.split(list(sizes), 1), first.unbind(), rows, strict=True):
        moved = piece + start
        if not checks.is_readable(ids):
            moved = torch.where((piece >= 0) & (piece < size), moved, table.size(0))
        moved_pieces.append(moved)
    return torch.cat(moved_pieces, 1)


def check_rows(by_rank: Tensor, sizes: Sequence[int], at: Sequence[str], rows: Sequence[int]) -> None:
    """Every id, of (W, N), is a row of its table. A compiled graph has ids that are not become none of the stack."""
    if not checks.is_readable(by_rank):
        return
    tables = list(range(len(sizes)))
    if by_rank.numel() and len(set(sizes)) == 1:
        by_table = by_rank.view(by_rank.size(0), len(sizes), sizes[0])
        lowest, highest = by_table.amin((0, 2)).tolist(), by_table.amax((0, 2)).tolist()
        tables = [place for place in tables if lowest[place] < 0 or highest[place] >= rows[place]]
    pieces = by_rank.split(list(sizes), 1)
    for place in tables:
        checks.check_ids(pieces[place], rows[place], at[place])
