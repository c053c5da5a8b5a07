"""What goes on the wire for each way of handling a site: what the rewrites note and the cost model adds up.

A move is a collective, its direction, and the bytes that go into it on each rank (`b` in the table of `traffic`). Sizes
are those of one rank: `nbytes` of its own rows. `gradient` says that a gradient goes back the same way.
"""

from __future__ import annotations

from typing import Any

import sympy

from passes.traffic import BACKWARD, FORWARD, W

Move = tuple[str, str, sympy.Expr]

_SIZES_BYTES = 3 * 8


def gathered(nbytes: sympy.Expr, *, batch_sharded: bool, gradient: bool) -> list[Move]:
    """Every rank gets the rows of all ranks, Shard(0) -> Replicate; replicated rows are there already."""
    if not batch_sharded:
        return [("all_reduce", BACKWARD, nbytes)] if gradient else []
    backward: list[Move] = [("reduce_scatter", BACKWARD, nbytes * W)] if gradient else []
    return [("all_gather", FORWARD, nbytes), *backward]


def spread(
    rows: sympy.Expr,
    num_columns: Any,
    itemsizes: tuple[Any, Any],
    *,
    batch_sharded: bool,
    gradient: bool,
    ragged: bool = False,
) -> list[Move]:
    """Every rank's columns are put together again: Shard(-1) -> Shard(0), or -> Replicate for replicated rows.

    Args:
        rows: of one rank.
        num_columns: D, of all ranks together.
        itemsizes: bytes of an element that travels, forward and backward.
        batch_sharded: True if each rank has its own rows.
        gradient: True if a gradient goes back.
        ragged: True if each rank's columns are padded to those of the widest.
    """
    if batch_sharded:
        return _exchanged(rows, num_columns, itemsizes, gradient, ragged)
    return [("all_gather", FORWARD, rows * _widest(num_columns) * itemsizes[0])]


def own_columns(
    rows: sympy.Expr, num_columns: Any, itemsize: Any, *, batch_sharded: bool, gradient: bool, ragged: bool = False
) -> list[Move]:
    """Every rank gets its columns of all rows: Shard(0) -> Shard(-1), or Replicate -> Shard(-1).

    The arguments are those of `spread`.
    """
    if batch_sharded:
        return _exchanged(rows, num_columns, (itemsize, itemsize), gradient, ragged)
    return [("all_gather", BACKWARD, rows * _widest(num_columns) * itemsize)] if gradient else []


def summed(nbytes: sympy.Expr, *, batch_sharded: bool) -> list[Move]:
    """The ranks' parts of a sum are added up, Partial -> Shard(0), or -> Replicate for replicated rows."""
    if not batch_sharded:
        return [("all_reduce", FORWARD, nbytes)]
    return [("reduce_scatter", FORWARD, nbytes * W), ("all_gather", BACKWARD, nbytes)]


def sent(nbytes: sympy.Expr, owners: Any, *, gradient: bool = False) -> list[Move]:
    """Ids, offsets or weights per sample go to each of the `owners` of a table's columns."""
    return [("all_to_all", direction, owners * nbytes) for direction in _directions(gradient)]


def sent_sizes(owners: Any) -> list[Move]:
    """The sizes of what `sent` sends, where the ranks' may differ."""
    return [("all_to_all", FORWARD, sympy.sympify(owners * _SIZES_BYTES))]


def reduced(nbytes: sympy.Expr, *, batch_sharded: bool) -> list[Move]:
    """The gradient of a parameter that every rank holds whole; with replicated rows it is whole on every rank."""
    return [("all_reduce", BACKWARD, nbytes)] if batch_sharded else []


def _exchanged(
    rows: sympy.Expr, num_columns: Any, itemsizes: tuple[Any, Any], gradient: bool, ragged: bool
) -> list[Move]:
    width = _widest(num_columns) * W if ragged else num_columns
    directions = zip(_directions(gradient), itemsizes, strict=False)
    return [("all_to_all", direction, rows * width * itemsize) for direction, itemsize in directions]


def _widest(num_columns: Any) -> sympy.Expr:
    """The columns of the rank that has most."""
    return sympy.ceiling(sympy.sympify(num_columns) / W)


def _directions(gradient: bool) -> tuple[str, ...]:
    return (FORWARD, BACKWARD) if gradient else (FORWARD,)
