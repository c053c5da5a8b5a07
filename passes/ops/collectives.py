"""Functional collectives: one spelling for every torch version from 2.11. No gradient and no layout here.

The operators of `torch.ops._c10d_functional` have kept their schema over these versions, while the Python functions
around them (`all_gather_tensor`, `all_gather_single`, `*_autograd`) were renamed and gained gradients of their own.
Groups go by name, so that a call can stand in a graph's text. Each call waits for its result at once: Inductor moves
the wait. What only moves values may take a `dtype` for their way: wider ones travel in it, and come out as they were
but for its rounding.

With W ranks in the group, every function works along dimension 0:

    all_gather      (n, ...)   -> (W*n, ...)   the ranks' rows, in the order of the group
    reduce_scatter  (W*n, ...) -> (n, ...)     the sum over ranks, this rank's rows
    all_reduce      (...)      -> (...)
    all_to_all      (n, ...)   -> (m, ...)     rows by destination -> rows by source
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from passes.layout import narrower

_ops = torch.ops._c10d_functional


def group_size(group: str) -> int:
    """The number of ranks in the process group of this name."""
    return c10d._get_group_size_by_name(cast("c10d.GroupName", group))


def group_rank(group: str) -> int:
    """This rank's place in the process group of this name."""
    return _resolve_process_group(cast("c10d.GroupName", group)).rank()


def can_order_groups() -> bool:
    """True if torch makes groups in another order than the ascending one, which torch 2.11 does not."""
    return "sort_ranks" in inspect.signature(c10d.new_group).parameters


def ordered_group(ranks: list[int]) -> Any:
    """`torch.distributed.new_group`, with the ranks in the order given; needs `can_order_groups`."""
    return c10d.new_group(ranks, sort_ranks=False)


# What `torch.compiler.assume_constant_result` does, without importing the compiler: a rank's place in a group never
# changes.
vars(group_rank)["_dynamo_marked_constant"] = True


def all_gather(x: Tensor, group: str, dtype: torch.dtype | None = None) -> Tensor:
    """(n, ...) -> (W*n, ...)."""
    gathered = _ops.all_gather_into_tensor(_narrowed(x, dtype).contiguous(), group_size(group), group)
    return cast(Tensor, _ops.wait_tensor(gathered)).to(x.dtype)


def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """(W*n, ...) -> (n, ...), summed over the ranks."""
    scattered = _ops.reduce_scatter_tensor(x.contiguous(), "sum", group_size(group), group)
    return cast(Tensor, _ops.wait_tensor(scattered))


def all_reduce(x: Tensor, group: str, op: str = "sum") -> Tensor:
    """The elementwise reduction ("sum", "max", "min") over the ranks."""
    return cast(Tensor, _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group)))


def all_to_all(x: Tensor, receive: list[int], send: list[int], group: str, dtype: torch.dtype | None = None) -> Tensor:
    """Sends `send[r]` rows to rank r, in order, and receives `receive[r]` rows from it."""
    exchanged = _ops.all_to_all_single(_narrowed(x, dtype).contiguous(), receive, send, group)
    return cast(Tensor, _ops.wait_tensor(exchanged)).to(x.dtype)


def _narrowed(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(narrower(x.dtype, dtype))
