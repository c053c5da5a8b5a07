"""What stands around an op on this rank's columns that is no redistribution: a bias, and the random numbers of dropout.

All ranks may draw the same random numbers (with replicated inputs they must), and yet a row's columns on different
ranks must not be dropped together:

    replicated      dropout of ones for all columns, as one process would draw them; each rank takes its own of these
    batch-sharded   rank r drops as if its rows began with its own batch: shift_rows -> dropout -> unshift_rows. So the
                    parts of a row are dropped by the numbers of different rows
"""

from __future__ import annotations

import torch
from torch import Tensor

from passes.ops.collectives import group_rank, group_size
from passes.ops.redistribute import slice_columns


def add_bias(out: Tensor, bias: Tensor) -> Tensor:
    """out (..., F) + bias (F,), in the dtype of `out`, as a linear under autocast has it."""
    return out + bias.to(out.dtype)


def ones_of_all_columns(columns: Tensor, num_columns: int) -> Tensor:
    """(..., d) -> (..., D) of ones."""
    return columns.new_ones((*columns.shape[:-1], num_columns))


def times_own_columns(columns: Tensor, factors: Tensor, num_columns: int, group: str) -> Tensor:
    """columns (..., d) * this rank's columns of factors (..., D)."""
    return columns * slice_columns(factors, num_columns, group)


def shift_rows(x: Tensor, group: str) -> Tensor:
    """(W*B, ...): the rows of all ranks, this rank's first, then those of the ranks after it, in a circle."""
    return _from_row(x, group_rank(group), group)


def unshift_rows(x: Tensor, group: str) -> Tensor:
    """The inverse of `shift_rows`."""
    return _from_row(x, group_size(group) - group_rank(group), group)


def _from_row(x: Tensor, rank: int, group: str) -> Tensor:
    rows = x.size(0)
    start = rank * (rows // group_size(group))
    return torch.cat([x.narrow(0, start, rows - start), x.narrow(0, 0, start)])
