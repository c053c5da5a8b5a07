"""Several lists of ids travel together to the ranks that own their features, from batches of any size.

    sizes                 all_to_all of a few numbers; the one host synchronisation
    lengths and ids       one all_to_all of both, for all lists
    weights               one all_to_all for all lists, for each dtype; the only one with a gradient

A message of lengths alone could be received only by a rank that knows the batch of the sender, so that unequal batches
would need a third message. With the sizes ahead, lengths and ids share the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from passes.ops.collectives import all_to_all, group_rank
from passes.ops.jagged import finish, launch, rank_order, segment_index, segment_sums, wait
from passes.ops.jagged_sizes import Features, JaggedList, check_sizes, column, sizes_message


@dataclass(frozen=True)
class Received:
    """One list as it arrives, in order of (feature, source rank, sample).

    Attributes:
        lengths: (sum of strides,).
        values: (N,).
        weights: (N,), or None.
        stride: the samples of every feature, those of all ranks; None where each feature has its own.
        strides: for each feature the samples of each source rank, in the order of `rank_order`; empty where there is a
            stride.
    """

    lengths: Tensor
    values: Tensor
    weights: Tensor | None
    stride: int | None
    strides: list[list[int]]


@dataclass(frozen=True)
class _Part:
    """A tensor, ordered by destination rank, that shares a message with others.

    Attributes:
        x: what is sent.
        send: how much of it goes to each rank.
        receive: how much of the like comes from each rank.
        sizes: (W,), the same on the device.
    """

    x: Tensor
    send: list[int]
    receive: list[int]
    sizes: Tensor


class _Message:
    """Named parts under way in one all_to_all: to rank 0 its piece of each part, to rank 1 its piece of each part, ...

    Attributes:
        starts: name -> (W,), where the piece of this part that comes from each rank begins in what arrives.
    """

    def __init__(self, parts: dict[str, _Part], group: str) -> None:
        by_part = list(parts.values())
        self.group = group
        self.send = [sum(sizes) for sizes in zip(*[part.send for part in by_part], strict=True)]
        self.receive = [sum(sizes) for sizes in zip(*[part.receive for part in by_part], strict=True)]
        self.sent = by_part[0].x
        if len(parts) > 1:
            pieces = [part.x.split(part.send) for part in by_part]
            self.sent = torch.cat([piece for to_rank in zip(*pieces, strict=True) for piece in to_rank])
        self.launched = launch(self.sent, self.receive, self.send, group)
        sizes = torch.stack([part.sizes for part in by_part], 1)
        starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view(sizes.shape)
        self.starts = dict(zip(parts, starts.unbind(1), strict=True))

    def wait(self) -> Tensor:
        return wait(self.launched, self.send)

    def wait_with_gradient(self, total: int) -> Tensor:
        return finish(self.sent, self.launched, self.receive, self.send, total, self.group)


@dataclass(frozen=True)
class _Counts:
    """What the host knows of one list: what goes to and comes from each rank, and totals of what comes."""

    send_lengths: list[int]
    send_ids: list[int]
    receive_lengths: list[int]
    receive_ids: list[int]
    num_lengths: int
    num_ids: int
    stride: int


class Exchange:
    """Lists on their way to the ranks that own their features; `finish` gives what arrived.

    Args:
        lists: this rank's, by name, at least one of those in `features`.
        features: for each list how many features each rank owns.
        stagger: see `rank_order`.
        group: name of the process group.
        agreement: a number that stands for all that must be the same on all ranks.
        equal_batches: whether all ranks have batches of one size; torch.compile then knows the shape of the lengths.
        at: for errors.

    Raises:
        InputError: in eager mode, on all ranks, if some rank's lists do not fit the features, themselves, or those of
            the other ranks.
    """

    def __init__(
        self,
        lists: Mapping[str, JaggedList],
        features: Mapping[str, Sequence[int]],
        *,
        stagger: int,
        group: str,
        agreement: int,
        equal_batches: bool,
        at: str,
    ) -> None:
        world = len(next(iter(features.values())))
        self._lists = lists
        self._owned = {name: per_rank[group_rank(group)] for name, per_rank in features.items()}
        self._order = rank_order(world, stagger)
        sent = sizes_message(lists, features, agreement)
        table = sent.table if world == 1 else all_to_all(sent.table, [1] * world, [1] * world, group)
        self._sizes = Sizes(table, sent.names)
        self._counts, totals = self._read_sizes(sent, features, equal_batches, at)

        wire = torch.int64 if any(x.values.dtype == torch.int64 for x in lists.values()) else torch.int32
        parts = {}
        for name, x in lists.items():
            counts, owned = self._counts[name], self._owned[name]
            if x.stride is None:
                strides = torch.tensor(x.strides, dtype=wire, device=table.device)
                sizes = torch.full((world,), owned, device=table.device)
                parts[f"{name} strides"] = _Part(strides, list(features[name]), [owned] * world, sizes)
            sizes = self._sizes.column(name, "num_lengths")
            parts[f"{name} lengths"] = _Part(x.lengths.to(wire), counts.send_lengths, counts.receive_lengths, sizes)
        for name, x in lists.items():
            parts[f"{name} ids"] = self._ids_part(name, x.values.to(wire))
        self._data = _Message(parts, group)
        self._weights = {
            dtype: (_Message({name: self._ids_part(name, lists[name].weights) for name in names}, group), totals[dtype])
            for dtype, names in _by_weight(lists).items()
        }

    def _ids_part(self, name: str, x: Tensor) -> _Part:
        counts = self._counts[name]
        return _Part(x, counts.send_ids, counts.receive_ids, self._sizes.column(name, "num_ids"))

    def _read_sizes(
        self, sent: Sizes, features: Mapping[str, Sequence[int]], equal_batches: bool, at: str
    ) -> tuple[dict[str, _Counts], dict[torch.dtype, int]]:
        """The one host synchronisation: for each list its counts, for each dtype of weights how many come."""
        column = self._sizes.column
        vectors = []
        for name in self._lists:
            vectors += [sent.column(name, "num_ids"), column(name, "num_ids"), column(name, "num_lengths")]
            totals = [column(name, which).sum() for which in ("num_lengths", "num_ids", "stride")]
            vectors.append(torch.stack(totals))
        by_weight = _by_weight(self._lists)
        for names in by_weight.values():
            vectors.append(torch.stack([column(name, "num_ids") for name in names]).sum().view(1))
        if torch.compiler.is_compiling():
            numbers = _to_host(vectors)
        else:
            *numbers, table = _to_host([*vectors, self._sizes.table.flatten()])
            width = self._sizes.table.size(1)
            rows = [table[start : start + width] for start in range(0, len(table), width)]
            check_sizes(rows, features, equal_batches, at)
        reader = iter(numbers)
        counts = {}
        for name, x in self._lists.items():
            send_lengths = sum_by_rank(x.strides, features[name])
            send_ids, receive_ids, receive_lengths, (num_lengths, num_ids, stride) = (next(reader) for _ in range(4))
            if equal_batches and x.stride is not None:
                stride = x.stride * len(self._order)
                receive_lengths = [x.stride * self._owned[name]] * len(self._order)
                num_lengths = stride * self._owned[name]
            counts[name] = _Counts(
                send_lengths, send_ids, receive_lengths, receive_ids, num_lengths, num_ids, stride
            )
        return counts, {dtype: next(reader)[0] for dtype in by_weight}

    def finish(self) -> dict[str, Received]:
        """Waits for what was sent, and puts it in order."""
        data = self._data.wait()
        weights = {dtype: message.wait_with_gradient(total) for dtype, (message, total) in self._weights.items()}
        return {
            name: self._received(name, x, data, None if x.weights is None else weights[x.weights.dtype])
            for name, x in self._lists.items()
        }

    def _received(self, name: str, x: Tensor, data: Tensor, weights: Tensor | None) -> Received:
        counts, owned, starts = self._counts[name], self._owned[name], self._data.starts
        order = torch.tensor(self._order, device=data.device)
        if x.stride is None:
            keys = torch.arange(owned, device=data.device)
            strides = data[starts[f"{name} strides"].unsqueeze(1) + keys].long()
        else:
            strides = self._sizes.column(name, "stride").unsqueeze(1).expand(-1, owned)
        first = starts[f"{name} lengths"].unsqueeze(1) + strides.cumsum(1) - strides
        # (source rank, key) -> (key, source rank in order).
        strides, first = strides[order].t().flatten(), first[order].t().flatten()
        lengths = data[segment_index(first, strides, counts.num_lengths)].to(x.lengths.dtype)
        ids = segment_sums(lengths, strides).view(owned, -1)
        before = ids.cumsum(0) - ids

        def in_order(message: Tensor, start: Tensor) -> Tensor:
            index = segment_index((start[order] + before).flatten(), ids.flatten(), counts.num_ids)
            return message.index_select(0, index)

        return Received(
            lengths=lengths,
            values=in_order(data, starts[f"{name} ids"]).to(x.values.dtype),
            weights=None if weights is None else in_order(weights, self._weights[weights.dtype][0].starts[name]),
            stride=None if x.stride is None else counts.stride,
            strides=[] ...
        )


def _by_weight(lists: Mapping[str, JaggedList]) -> dict[torch.dtype, list[str]]:
    """The names of the lists with weights, by the dtype of these."""
    names: dict[torch.dtype, list[str]] = {}
    for name, x in lists.items():
        if x.weights is not None:
            names.setdefault(x.weights.dtype, []).append(name)
    return names


def _to_host(vectors: list[Tensor]) -> list[list[int]]:
    """The numbers of each vector, with one host synchronisation; unbacked sizes inside of torch.compile."""
    with torch._dynamo.patch_dynamo_config(capture_scalar_outputs=True):
        flat = torch.cat(vectors).tolist()
    if torch.compiler.is_compiling():
        for number in flat:
            torch._check(number >= 0)
    numbers, start = [], 0
    for vector in vectors:
        numbers.append(flat[start : start + vector.size(0)])
        start += vector.size(0)
    return numbers
