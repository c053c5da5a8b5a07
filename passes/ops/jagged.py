"""The jagged all_to_all: lists of ids, of many features, travel to the ranks that own the features.

W ranks; rank r owns features_per_rank[r] consecutive features of F. A rank holds, key-major, B samples of every
feature: lengths (F*B,), values (N,) with N the sum of the lengths, and weights (N,) or none. What arrives is ordered by
(source rank, feature, sample); what every op wants is (feature, source rank, sample). That reordering is called recat,
and the vector that describes it too.

    function           what travels                              forward       backward
    exchange_lengths   lengths, of equal batches                 all_to_all    none
    exchange_jagged    values or weights of any sizes            all_to_all    all_to_all, the sizes swapped
    start_exchange     whole features, batches of any size       two or three  one, for the weights
                       and of several lists at once              all_to_alls

`start_exchange` sends sizes first, and then lengths and ids in one message. So batches may differ between the ranks,
which the receiver of a message of lengths alone would have to know beforehand; the number of collectives is the one
that equal batches need (lengths, then ids), and one host synchronisation gives all sizes. The sizes also carry what
every rank must know to raise the same error as the others.

Shapes are those of TorchRec's KJTAllToAll and its `_get_recat`, checked against recorded vectors of TorchRec 1.8.0.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from passes.ops import jagged_sizes
from passes.ops.collectives import all_to_all, group_rank, group_size
from passes.ops.jagged_sizes import JaggedList
from passes.ops.redistribute import apply

_ops = torch.ops._c10d_functional


class _Exchange(Function):
    """What `launched` brings, as a function of the rows that it was given."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, launched: Tensor, receive: list[int], send: list[int], total: int, group: str
    ) -> Tensor:
        ctx.arguments = (send, receive, x.size(0), group)
        return _wait(launched, send).narrow(0, 0, total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return exchange_jagged(gradient, *ctx.arguments), None, None, None, None, None


def _launch(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    """An all_to_all that is still under way; `_wait` must be called on what it returns."""
    if len(send) == 1:
        return x.detach()
    return cast(Tensor, _ops.all_to_all_single(x.detach().contiguous(), receive, send, group))


def _wait(x: Tensor, send: list[int]) -> Tensor:
    return x if len(send) == 1 else cast(Tensor, _ops.wait_tensor(x))
