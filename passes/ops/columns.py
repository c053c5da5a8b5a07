"""Columns and rows change places: what travels and where it goes, without a gradient.

W ranks. Of a matrix (B, D) on each rank, W*B rows in all, rank r has B rows of all D columns, or all rows of d columns.
Several matrices, of any B and D, share one message, packed by destination: for rank 0 its part of the first, of the
second, ...; for rank 1, ... A `dtype` is that of `collectives`: in which wider values travel.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from passes.layout import chunk_sizes
from passes.ops.collectives import all_to_all, group_rank, group_size


def columns_for_rows(
    group: str, num_columns: tuple[int, ...], *matrices: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """For each (W*B, d) -> (B, D): every rank's columns of this rank's rows, side by side in order."""
    world, rank = group_size(group), group_rank(group)
    sizes = [chunk_sizes(columns, world) for columns in num_columns]
    rows = [x.size(0) // world for x in matrices]
    by_rank = [x.reshape(world, n * owned[rank]) for x, n, owned in zip(matrices, rows, sizes, strict=True)]
    packed = by_rank[0] if len(by_rank) == 1 else torch.cat(by_rank, 1)
    blocks = [[n * owned[source] for n, owned in zip(rows, sizes, strict=True)] for source in range(world)]
    came = all_to_all(packed.flatten(), [sum(block) for block in blocks], [packed.size(1)] * world, group, dtype)
    if _are_even(num_columns, world):
        parts = came.view(world, packed.size(1)).split(blocks[0], 1)
        moved = [x.view(world, n, owned[0]).transpose(0, 1) for x, n, owned in zip(parts, rows, sizes, strict=True)]
        copies = [x.clone(memory_format=torch.contiguous_format) for x in moved]
        # No `view`: torch refuses to change in place what a Function has made one.
        unsafe_view = torch.ops.aten._unsafe_view.default
        return tuple(unsafe_view(x, [x.size(0), world * x.size(2)]) for x in copies)
    pieces = came.split([size for block in blocks for size in block])
    return tuple(
        side_by_side([pieces[source * len(rows) + place].view(n, owned[source]) for source in range(world)], owned)
        for place, (n, owned) in enumerate(zip(rows, sizes, strict=True))
    )


def rows_for_columns(
    group: str, num_columns: tuple[int, ...], *matrices: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """For each (B, D) -> (W*B, d): the inverse of `columns_for_rows`."""
    world, rank = group_size(group), group_rank(group)
    sizes = [chunk_sizes(columns, world) for columns in num_columns]
    rows = [x.size(0) for x in matrices]
    own = [n * owned[rank] for n, owned in zip(rows, sizes, strict=True)]
    if _are_even(num_columns, world):
        by_rank = [x.reshape(n, world, x.size(1) // world).transpose(0, 1) for x, n in zip(matrices, rows, strict=True)]
        packed = torch.cat([x.reshape(world, size) for x, size in zip(by_rank, own, strict=True)], 1).flatten()
    else:
        split = [x.split(owned, 1) for x, owned in zip(matrices, sizes, strict=True)]
        packed = torch.cat([pieces[target].reshape(-1) for target in range(world) for pieces in split])
    send = [sum(n * owned[target] for n, owned in zip(rows, sizes, strict=True)) for target in range(world)]
    came = all_to_all(packed, [sum(own)] * world, send, group, dtype).view(world, sum(own)).split(own, 1)
    return tuple(piece.reshape(world * n, owned[rank]) for piece, n, owned in zip(came, rows, sizes, strict=True))


def _are_even(num_columns: tuple[int, ...], world: int) -> bool:
    """True if all ranks have as many columns: a transposition then does for what else takes a piece for each rank."""
    return all(columns % world == 0 for columns in num_columns)


def side_by_side(pieces: Iterable[Tensor], sizes: list[int]) -> Tensor:
    """Every rank's columns, without what they were padded by, in order.

    A copy also where there is one piece: torch refuses to change in place what a Function has made a view.
    """
    return torch.cat([piece.narrow(-1, 0, size) for piece, size in zip(pieces, sizes, strict=True)], -1)
