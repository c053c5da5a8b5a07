"""Several lists of ids travel together to the ranks that own their features, from batches of any size.

    sizes                 an all_to_all of a few numbers, and the one host synchronisation
    lengths and ids       an all_to_all of both, for all lists
    weights               an all_to_all for all lists whose weights are of one dtype, the only one with a gradient

Lengths alone could be received only by a rank that knows the sender's batch, so that unequal batches would need one
more collective. With the sizes ahead, lengths and ids share the second: as int64 if some list has such ids, and else as
int32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from passes.ops.collectives import all_to_all, group_rank
from passes.ops.jagged import finish, launch, rank_order, segment_index, segment_sums, to_host, wait
from passes.ops.jagged_sizes import JaggedList, Sizes, check_sizes, sizes_message, sum_by_rank


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
        self._group = group
        # The sum of one unbacked size is none that Dynamo takes into a Function.
        self._send, self._receive, self._sent = by_part[0].send, by_part[0].receive, by_part[0].x
        if len(by_part) > 1:
            self._send = [sum(sizes) for sizes in zip(*[part.send for part in by_part], strict=True)]
            self._receive = [sum(sizes) for sizes in zip(*[part.receive for part in by_part], strict=True)]
            pieces = [part.x.split(part.send) for part in by_part]
            self._sent = torch.cat([piece for to_rank in zip(*pieces, strict=True) for piece in to_rank])
        self._launched = launch(self._sent, self._receive, self._send, group)
        sizes = torch.stack([part.sizes for part in by_part], 1)
        starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view(sizes.shape)
        self.starts = dict(zip(parts, starts.unbind(1), strict=True))

    def wait(self) -> Tensor:
        return wait(self._launched, self._send)

    def wait_with_gradient(self, total: int) -> Tensor:
        return finish(self._sent, self._launched, self._receive, self._send, total, self._group)


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
        lists: this rank's, by name, some of those in `features`.
        features: for each list how many features each rank owns.
        stagger: see `rank_order`.
        group: name of the process group.
        device: where the lists are.
        agreement: a number that stands for all that must be the same on all ranks.
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
        device: torch.device,
        agreement: int,
        at: str,
    ) -> None:
        world = len(next(iter(features.values())))
        self._lists = lists
        self._owned = {name: per_rank[group_rank(group)] for name, per_rank in features.items()}
        self._order = rank_order(world, stagger)
        sent = sizes_message(lists, features, agreement, device)
        table = sent.table if world == 1 else all_to_all(sent.table, [1] * world, [1] * world, group)
        self._sizes = Sizes(table, sent.names)
        self._weighted: dict[torch.dtype, dict[str, Tensor]] = {}
        for name, x in lists.items():
            if x.weights is not None:
                self._weighted.setdefault(x.weights.dtype, {})[name] = x.weights
        self._counts, self._num_weights = self._read_sizes(sent, features, at)
        self._data, self._weights = self._send(features, group)

    def _read_sizes(
        self, sent: Sizes, features: Mapping[str, Sequence[int]], at: str
    ) -> tuple[dict[str, _Counts], list[int]]:
        """The one host synchronisation: the counts of each list, and how many weights of each dtype come."""
        column = self._sizes.column
        vectors = []
        for name in self._lists:
            totals = [column(name, which).sum() for which in ("num_lengths", "num_ids", "stride")]
            vectors += [sent.column(name, "num_ids"), column(name, "num_ids"), column(name, "num_lengths")]
            vectors.append(torch.stack(totals).clamp(min=0))
        for names in self._weighted.values():
            vectors.append(torch.stack([column(name, "num_ids") for name in names]).sum().view(1))
        if torch.compiler.is_compiling():
            numbers = to_host(vectors)
        else:
            *numbers, flat = to_host([*vectors, self._sizes.table.flatten()])
            width = self._sizes.table.size(1)
            rows = [flat[start : start + width] for start in range(0, len(flat), width)]
            check_sizes(rows, features, at)
        counts = {}
        for place, (name, x) in enumerate(self._lists.items()):
            send_ids, receive_ids, receive_lengths, (num_lengths, num_ids, stride) = numbers[4 * place : 4 * place + 4]
            send_lengths = sum_by_rank(x.strides, features[name])
            counts[name] = _Counts(send_lengths, send_ids, receive_lengths, receive_ids, num_lengths, num_ids, stride)
        return counts, [number for (number,) in numbers[4 * len(counts) :]]

    def _send(self, features: Mapping[str, Sequence[int]], group: str) -> tuple[_Message | None, list[_Message]]:
        wire = torch.int64 if any(x.values.dtype == torch.int64 for x in self._lists.values()) else torch.int32
        heads, ids = {}, {}
        for name, x in self._lists.items():
            counts, world = self._counts[name], len(self._order)
            if x.stride is None:
                strides = torch.tensor(x.strides, dtype=wire, device=x.lengths.device)
                sizes = torch.full((world,), self._owned[name], device=x.lengths.device)
                send, receive = list(features[name]), [self._owned[name]] * world
                heads[f"{name} strides"] = _Part(strides, send, receive, sizes)
            sizes = self._sizes.column(name, "num_lengths")
            heads[f"{name} lengths"] = _Part(x.lengths.to(wire), counts.send_lengths, counts.receive_lengths, sizes)
            ids[f"{name} ids"] = self._ids_part(name, x.values.to(wire))
        data = _Message(heads | ids, group) if ids else None
        weights = []
        for by_name in self._weighted.values():
            parts = {name: self._ids_part(name, x) for name, x in by_name.items()}
            weights.append(_Message(parts, group))
        return data, weights

    def _ids_part(self, name: str, x: Tensor) -> _Part:
        counts = self._counts[name]
        return _Part(x, counts.send_ids, counts.receive_ids, self._sizes.column(name, "num_ids"))

    def finish(self) -> dict[str, Received]:
        """Waits for what was sent, and puts it in order."""
        if self._data is None:
            return {}
        data = self._data.wait()
        weights = {}
        for names, message, total in zip(self._weighted.values(), self._weights, self._num_weights, strict=True):
            arrived = message.wait_with_gradient(total)
            weights.update({name: (arrived, message.starts[name]) for name in names})
        return {name: self._in_order(name, data, self._data.starts, weights.get(name)) for name in self._lists}

    def _in_order(
        self, name: str, data: Tensor, starts: dict[str, Tensor], weights: tuple[Tensor, Tensor] | None
    ) -> Received:
        x, counts, owned = self._lists[name], self._counts[name], self._owned[name]
        order = torch.tensor(self._order, device=data.device)
        if x.stride is None:
            keys = torch.arange(owned, device=data.device)
            strides = data[starts[f"{name} strides"].unsqueeze(1) + keys].long()
        else:
            strides = self._sizes.column(name, "stride").unsqueeze(1).expand(-1, owned)
        first = starts[f"{name} lengths"].unsqueeze(1) + strides.cumsum(1) - strides
        # (source rank, key) -> (key, source rank in order).
        strides, first = strides[order].t(), first[order].t()
        lengths = data.index_select(0, segment_index(first.flatten(), strides.flatten(), counts.num_lengths))
        ids = segment_sums(lengths, strides.flatten()).view(owned, len(self._order))
        before = ids.cumsum(0) - ids

        def in_order(message: Tensor, start: Tensor) -> Tensor:
            return message.index_select(
                0, segment_index((start[order] + before).flatten(), ids.flatten(), counts.num_ids)
            )

        return Received(
            lengths=lengths.to(x.lengths.dtype),
            values=in_order(data, starts[f"{name} ids"]).to(x.values.dtype),
            weights=None if weights is None else in_order(*weights),
            stride=None if x.stride is None else counts.stride,
            strides=to_host(list(strides)) if x.stride is None else [],
        )
