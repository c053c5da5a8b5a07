"""The sizes that travel ahead of lookups to their owners, where the ranks' batches may differ.

Of each lookup that a rank owns columns of, every rank tells it three numbers: the rows that it wants back, its offsets,
and its ids. Everything else follows: where each part begins in the messages that arrive, and in the one that goes back.
That is worked out on the device; the host reads only sizes, once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from passes.ops.collectives import all_to_all
from passes.ops.jagged import segment_index, to_host


@dataclass(frozen=True)
class Numbers:
    """What the host knows. Inside of torch.compile these are unbacked sizes, each total one of its own.

    Attributes:
        elements: offsets and ids that come from each rank.
        rows, offsets, ids: of each lookup that this rank owns a part of, those of all ranks.
        weights: for each message of weights how many come from each rank, and their sum.
        send_back: elements of the results for each rank.
        total_back: their sum.
    """

    elements: list[int]
    rows: list[int]
    offsets: list[int]
    ids: list[int]
    weights: list[tuple[list[int], int]]
    send_back: list[int]
    total_back: int


@dataclass(frozen=True)
class Sizes:
    """Of the F lookups that this rank owns columns of.

    Attributes:
        rows, offsets, ids: (W, F) int64, what each rank brought.
        columns: d of each.
        weighted: for each message of weights, which of the F have some.
    """

    rows: Tensor
    offsets: Tensor
    ids: Tensor
    columns: list[int]
    weighted: list[list[int]]

    def read(self) -> Numbers:
        """The one host synchronisation."""
        world, owned = self.rows.shape
        if owned == 0:
            nothing = [0] * world
            return Numbers(nothing, [], [], [], [(nothing, 0) for _ in self.weighted], nothing, 0)
        back = self._elements_back()
        vectors = [(self.offsets + self.ids).sum(1), self.rows.sum(0), self.offsets.sum(0), self.ids.sum(0)]
        vectors += [back.sum(1), back.sum().view(1)]
        for chosen in self.weighted:
            counts = self.ids[:, chosen]
            vectors += [counts.sum(1), counts.sum().view(1)]
        elements, rows, offsets, ids, send_back, (total_back,), *weights = to_host(vectors)
        pairs = [(weights[place], weights[place + 1][0]) for place in range(0, len(weights), 2)]
        return Numbers(elements, rows, offsets, ids, pairs, send_back, total_back)

    def places_of_offsets(self, number: int, total: int) -> Tensor:
        """(offsets of all ranks,), where those of lookup `number` stand in what arrived."""
        starts = self._starts(torch.stack([self.offsets, self.ids], 2))
        return segment_index(starts[:, number, 0], self.offsets[:, number], total)

    def places_of_ids(self, number: int, total: int) -> Tensor:
        """(ids of all ranks,)."""
        starts = self._starts(torch.stack([self.offsets, self.ids], 2))
        return segment_index(starts[:, number, 1], self.ids[:, number], total)

    def places_of_weights(self, message: int, number: int, total: int) -> Tensor:
        """(ids of all ranks,), where the weights of lookup `number` stand in a message of weights."""
        chosen = self.weighted[message]
        starts = self._starts(self.ids[:, chosen])
        return segment_index(starts[:, chosen.index(number)], self.ids[:, number], total)

    def ids_before(self, number: int, total: int) -> Tensor:
        """(offsets of all ranks,), how many ids come before those of the rank that brought the offset."""
        ids = self.ids[:, number]
        return torch.repeat_interleave(ids.cumsum(0) - ids, self.offsets[:, number], output_size=total)

    def bags(self, number: int, total: int) -> Tensor:
        """(bags of all ranks,), which of the offsets begin bags: all but the last of each rank."""
        offsets = self.offsets[:, number]
        return segment_index(offsets.cumsum(0) - offsets, self.rows[:, number], total)

    def starts_back(self, number: int, total: int) -> Tensor:
        """(rows of all ranks,), where each row of what lookup `number` gives begins in the message that goes back."""
        rows, d = self.rows[:, number], self.columns[number]
        starts = self._starts(self._elements_back())[:, number] - d * (rows.cumsum(0) - rows)
        ahead = torch.repeat_interleave(starts, rows, output_size=total)
        return ahead + d * torch.arange(total, device=rows.device)

    def _elements_back(self) -> Tensor:
        return self.rows * torch.tensor(self.columns, device=self.rows.device)

    @staticmethod
    def _starts(sizes: Tensor) -> Tensor:
        """Where parts of these sizes begin, which stand one after the other in the order of their dimensions."""
        flat = sizes.flatten()
        return (flat.cumsum(0) - flat).view(sizes.shape)


def exchange_sizes(
    own: list[tuple[int, int, int]],
    owned_by: list[list[int]],
    rank: int,
    columns: list[int],
    weighted: list[list[int]],
    group: str,
    device: torch.device,
) -> Sizes:
    """Every rank tells the owners what it brings.

    Args:
        own: for each lookup the rows, offsets and ids of this rank.
        owned_by: for each rank the lookups that it owns columns of.
        rank: this one.
        columns: of each lookup that this rank owns a part of.
        weighted: see `Sizes`.
        group: name of the process group.
        device: of the ids.
    """
    world, mine = len(owned_by), owned_by[rank]
    numbers = [number for places in owned_by for place in places for number in own[place]]
    table = torch.tensor(numbers, device=device)
    if world > 1:
        receive = [3 * len(mine)] * world
        table = all_to_all(table, receive, [3 * len(places) for places in owned_by], group)
    rows, offsets, ids = table.view(world, len(mine), 3).unbind(2)
    return Sizes(rows, offsets, ids, columns, weighted)
