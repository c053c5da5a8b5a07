"""The jagged all_to_all: lists of ids, of many features, travel to the ranks that own the features.

W ranks, of which rank r owns features_per_rank[r] consecutive features of F. A rank holds, key-major, B samples of
every feature: lengths (F*B,), values (N,) with N the sum of the lengths, and weights (N,) or none. What arrives is
ordered by (source rank, feature, sample); what every op wants is (feature, source rank, sample). That reordering is
called recat, as is the vector that describes it. The shapes, and `recat`, are those of TorchRec's KJTAllToAll.

    function           what travels                           forward            backward
    exchange_lengths   lengths of equal batches               all_to_all         none
    exchange_jagged    values or weights of any sizes         all_to_all         all_to_all, the sizes swapped

Whole features, of several lists at once and with batches of any size, travel by `jagged_lists`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from passes.layout import AS_IT_IS, Wire
from passes.ops.collectives import all_to_all, group_rank
from passes.ops.redistribute import apply

_ops = torch.ops._c10d_functional


class _Exchange(Function):
    """What `launched` brings, as a function of the rows that it was given."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, launched: Tensor, receive: list[int], send: list[int], total: int, group: str
    ) -> Tensor:
        ctx.arguments = (send, receive, x.size(0), group)
        return wait(launched, send).narrow(0, 0, total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return exchange_jagged(gradient, *ctx.arguments), None, None, None, None, None


class _ExchangeAtOnce(Function):
    """`_Exchange` with its all_to_all inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, receive: list[int], send: list[int], total: int, group: str, wire: Wire) -> Tensor:
        # Dynamo hands a size on to the backward only if it was made in here, or is that of a tensor.
        ctx.arguments = ([size + 0 for size in send], [size + 0 for size in receive], x.size(0), group, wire[::-1])
        return all_to_all(x, receive, send, group, wire[0]).narrow(0, 0, total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply(_ExchangeAtOnce, gradient, *ctx.arguments), None, None, None, None, None


def rank_order(num_ranks: int, stagger: int = 1) -> list[int]:
    """The order of the source ranks in what a rank receives: with stagger s, the first of s equal parts, and so on."""
    step = num_ranks // stagger
    return [first + step * part for first in range(step) for part in range(stagger)]


def recat(
    num_keys: int, num_ranks: int, stagger: int = 1, batch_per_rank: Sequence[int] | None = None
) -> list[int] | None:
    """Where each (key, source rank) of the result stands among what arrived, which is ordered by (source rank, key).

    Args:
        num_keys: the keys that this rank owns.
        num_ranks: W.
        stagger: W is a multiple of it.
        batch_per_rank: the samples of each rank.

    Returns:
        num_keys*W numbers; where the batches differ, one number for each sample instead. None if the rank owns no key.
    """
    if num_keys == 0:
        return None
    order = [key + rank * num_keys for key in range(num_keys) for rank in rank_order(num_ranks, stagger)]
    if batch_per_rank is None or len(set(batch_per_rank)) == 1:
        return order
    sizes = [batch for batch in batch_per_rank for _ in range(num_keys)]
    ends = list(itertools.accumulate(sizes))
    return [index for place in order for index in range(ends[place] - sizes[place], ends[place])]


def segment_index(starts: Tensor, sizes: Tensor, total: int) -> Tensor:
    """(total,) int64: the places of segments that stand one after the other in the result.

    Args:
        starts: (S,), where each segment begins in the source.
        sizes: (S,).
        total: the sum of the sizes.
    """
    shift = starts - (sizes.cumsum(0) - sizes)
    return torch.arange(total, device=sizes.device) + torch.repeat_interleave(shift, sizes, output_size=total)


def segment_sums(x: Tensor, sizes: Tensor) -> Tensor:
    """(sum of sizes,) -> (S,) int64: the sums of S segments that stand one after the other."""
    before = F.pad(x.cumsum(0), (1, 0))
    ends = sizes.cumsum(0)
    return before[ends] - before[ends - sizes]


def exchange_lengths(lengths: Tensor, features_per_rank: Sequence[int], group: str) -> Tensor:
    """Lengths of batches of one size: (F*B,) -> (W*f*B,), ordered by (source rank, feature, sample).

    Args:
        lengths: key-major.
        features_per_rank: W numbers, F in all; f is that of this rank.
        group: name of the process group.
    """
    batch = lengths.size(0) // max(1, sum(features_per_rank))
    receive = [features_per_rank[group_rank(group)] * batch] * len(features_per_rank)
    return all_to_all(lengths, receive, [count * batch for count in features_per_rank], group)


def exchange_jagged(
    x: Tensor, receive: list[int], send: list[int], total: int, group: str, wire: Wire = AS_IT_IS
) -> Tensor:
    """(sum of send, ...) -> (total, ...), with a gradient: rows by destination -> rows by source.

    Args:
        x: values or weights.
        receive: the rows that come from each rank.
        send: the rows that go to each rank.
        total: the sum of `receive`. Inside of torch.compile, where these are unbacked sizes, it must be one of its own.
        group: name of the process group.
        wire: in which dtypes x, and its gradient, travel if theirs is wider.
    """
    torch._check(total <= sum(receive))
    return x if len(send) == 1 else apply(_ExchangeAtOnce, x, receive, send, total, group, wire)


def launch(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    """The all_to_all of `exchange_jagged` without its gradient; under way until `wait` or `finish`."""
    if len(send) == 1:
        return x.detach()
    return cast(Tensor, _ops.all_to_all_single(x.detach().contiguous(), receive, send, group))


def wait(launched: Tensor, send: list[int]) -> Tensor:
    """What `launch` brings."""
    return launched if len(send) == 1 else cast(Tensor, _ops.wait_tensor(launched))


def finish(x: Tensor, launched: Tensor, receive: list[int], send: list[int], total: int, group: str) -> Tensor:
    """What `launch` brings, with its gradient. The arguments are those of `exchange_jagged`."""
    torch._check(total <= sum(receive))
    return apply(_Exchange, x, launched, receive, send, total, group)


def to_host(vectors: list[Tensor]) -> list[list[int]]:
    """The numbers of each vector, with one host synchronisation; unbacked sizes inside of torch.compile."""
    with torch._dynamo.patch_dynamo_config(capture_scalar_outputs=True):
        # All in one copy: the compiler reads a tensor's elements one by one.
        flat = torch.cat(vectors).cpu().tolist() if vectors else []
    if torch.compiler.is_compiling():
        for number in flat:
            torch._check(number >= 0)
    numbers, start = [], 0
    for vector in vectors:
        numbers.append(flat[start : start + vector.size(0)])
        start += vector.size(0)
    return numbers
