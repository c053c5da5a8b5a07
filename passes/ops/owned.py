"""Lookups on the ranks that own columns of a table: ids go to them, columns come back.

W ranks; of a table of D columns rank r owns d[r], none on most. A rank brings n ids to each lookup; they stand in bags
of L, or in bags that begin at offsets, or by themselves. All lookups of one `send` share their messages:

    send         ids, offsets, weights    -> the ranks that own columns    all_to_all; weights: one with a gradient
    embedding, embedding_bag              on an owner, of the ids of all ranks (N,) -> (rows of all ranks, d)
    send_back    (rows of all ranks, d)   -> (own rows, D)                 all_to_all, with a gradient

Equal batches need no more: every size follows from this rank's own input. Where batches may differ (`ragged`), the
sizes travel first, an all_to_all of two numbers for each lookup and owner, and the host reads them once.

Ids travel as int32 unless a table has more rows than that counts; what is out of range stays out of range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from passes.layout import AS_IT_IS, Wire, id_dtype, owner_sizes
from passes.ops import lookup, owned_checks
from passes.ops.collectives import all_to_all, group_rank, group_size
from passes.ops.jagged import exchange_jagged
from passes.ops.owned_sizes import Numbers, Sizes, exchange_sizes
from passes.ops.redistribute import apply

# (num_embeddings, num_columns, the ranks that share the columns)
Table = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True)
class Lookup:
    """What one rank brings to a lookup.

    Attributes:
        ids: (n,).
        weights: (n,), or None.
        offsets: (bags,), with one more where each has a last offset; None for ids that stand in bags of equal length,
            or by themselves.
        rows: of the result: bags, or ids that stand by themselves.
        bag_length: L, of bags without offsets; None for other ids.
        last_offset: 1 if the last offset is the end of the last bag.
        shape: of the result, without its columns.
    """

    ids: Tensor
    weights: Tensor | None
    offsets: Tensor | None
    rows: int
    bag_length: int | None
    last_offset: int
    shape: Sequence[int]

    @property
    def num_offsets(self) -> int:
        return 0 if self.offsets is None else self.offsets.size(0)


@dataclass(frozen=True)
class Arrived:
    """What an owner looks up: the ids of all ranks, one rank's after the other's.

    Attributes:
        ids: (N,).
        offsets: where the bags of all ranks begin; None for ids that stand by themselves.
        weights: as ids, or None.
        bags: (bags of all ranks,), which of the results are bags; None if all are.
    """

    ids: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    bags: Tensor | None


@dataclass(frozen=True)
class Way:
    """How columns go back: in which order they are packed, and how many elements go where.

    Attributes:
        starts: for each lookup that this rank owns a part of, where each of its rows (N,) begins in the message; empty
            for equal batches, where the order is that of a matrix.
        send: elements to each rank.
        total: their sum.
    """

    starts: list[Tensor]
    send: list[int]
    total: int


@dataclass(frozen=True)
class Sent:
    """The lookups of one `send`.

    Attributes:
        arrived: for each lookup; None where this rank owns none of its columns.
        own: what this rank brought to each.
        sizes: for each lookup the columns that each rank owns.
        way: back.
        weights: all that arrived.
        group: name of the process group.
    """

    arrived: list[Arrived | None]
    own: list[Lookup]
    sizes: list[list[int]]
    way: Way
    weights: list[Tensor]
    group: str


class _Tie(Function):
    """The first tensor; the second one gets a gradient of zeros, so that what brought it runs backward on every rank.

    A gradient that hangs on no other would let the compiler run that exchange in the forward of some ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tied: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = tied.shape, tied.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient[:0].sum().to(ctx.dtype).expand(ctx.shape)


def send(
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    *,
    tables: Sequence[Table],
    bags: Sequence[bool],
    last_offsets: Sequence[bool],
    group: str,
    ragged: bool,
    at: Sequence[str],
) -> Sent:
    """Sends the ids of several lookups to the ranks that own columns of their tables.

    Args:
        ids: for each lookup (...), int32 or int64; for bags (bags, L), or (n,) with offsets.
        offsets: for each lookup (bags,), or (bags + 1,) where it has last offsets; None for other ids.
        weights: per sample, of the shape of ids; or None.
        tables: for each lookup.
        bags: whether the lookup is an embedding_bag.
        last_offsets: whether the last offset is the end of the last bag.
        group: name of the process group.
        ragged: True if the ranks' batches may differ in size.
        at: module paths, for errors.

    Raises:
        InputError, IdRangeError: in eager mode, on all ranks, for input that some rank should not have brought.
    """
    given = zip(ids, offsets, weights, bags, last_offsets, strict=True)
    own = [_lookup(*operands) for operands in given]
    owned_checks.check_lookups(own, ids, [table[0] for table in tables], list(at), group, ragged=ragged)
    sizes = [owner_sizes(num_columns, group_size(group), owners) for _, num_columns, owners in tables]
    wire = id_dtype(max(rows for rows, _, _ in tables))
    packed = [_pack(x, wire) for x in own]
    if ragged:
        return _send_ragged(own, packed, sizes, group)
    return _send_equal(own, packed, sizes, group)


def embedding(
    sent: Sent,
    place: int,
    weight: Tensor,
    *,
    at: str,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """`F.embedding` of lookup number `place` on this rank's columns (V, d): (N, d). None on a rank that owns none."""
    x = sent.arrived[place]
    if x is None:
        return None
    options = {"padding_idx": padding_idx, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    return lookup.embedding(x.ids, weight, at=at, **options)  # type: ignore[arg-type]  # mypy joins the options' types


def embedding_bag(
    sent: Sent,
    place: int,
    weight: Tensor,
    *,
    at: str,
    mode: str = "mean",
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """`F.embedding_bag` of lookup number `place` on this rank's columns (V, d): (bags of all ranks, d), or None.

    Raises:
        InputError: on all ranks, for weights per sample that torch does not take.
    """
    owned_checks.check_weights(sent.own[place], weight.dtype, mode, at)
    x = sent.arrived[place]
    if x is None:
        return None
    ids, offsets, weights, bags = x.ids, x.offsets, x.weights, x.bags
    if sparse and offsets is not None and bags is not None:
        ids, offsets, weights = lookup.only_bags(ids, offsets, weights, bags)
        bags = None
    out = lookup.embedding_bag(
        ids,
        weight,
        offsets,
        weights,
        at=at,
        mode=mode,
        padding_idx=padding_idx,
        scale_grad_by_freq=scale_grad_by_freq,
        sparse=sparse,
    )
    return out if bags is None else out.index_select(0, bags)


def send_back(
    sent: Sent, columns: Sequence[Tensor | None], shards: Sequence[Tensor], *, wire: Wire = AS_IT_IS
) -> list[Tensor]:
    """The results of all lookups: for each (..., D), the rows of this rank with all columns.

    Args:
        sent: what `send` gave.
        columns: what the lookups gave.
        shards: this rank's columns of the tables. A rank that looks up nothing has a gradient to send all the same, and
            gets it into its graph through those that are empty.
        wire: in which dtypes the results, and their gradient, travel if theirs is wider.
    """
    found = [x for x in columns if x is not None]
    empty = [x.reshape(-1) for x in shards if x.size(1) == 0]
    world, way = len(sent.sizes[0]), sent.way
    if way.starts:
        places = [
            (start.unsqueeze(1) + torch.arange(x.size(1), device=x.device)).flatten()
            for start, x in zip(way.starts, found, strict=True)
        ]
        values = torch.cat([*empty, *(x.flatten() for x in found)])
        flat = values.new_zeros(way.total).index_put((torch.cat(places),), values)
    elif found:
        packed = torch.cat([x.reshape(world, -1) for x in found], 1).flatten()
        flat = torch.cat([*empty, packed])
    else:
        flat = torch.cat(empty)
    for arrived in sent.weights:
        flat = apply(_Tie, flat, arrived)
    blocks = [(x.rows, owned[rank]) for rank in range(world) for x, owned in zip(sent.own, sent.sizes, strict=True)]
    per_rank = len(sent.own)
    receive = [sum(rows * d for rows, d in blocks[r * per_rank : (r + 1) * per_rank]) for r in range(world)]
    total = sum(rows * d for rows, d in blocks)
    came = exchange_jagged(flat, receive, way.send, total, sent.group, wire).split([rows * d for rows, d in blocks])
    results = []
    for place, x in enumerate(sent.own):
        pieces = [came[rank * per_rank + place].view(x.rows, d) for rank, d in enumerate(sent.sizes[place]) if d]
        results.append(torch.cat(pieces, 1).view(*x.shape, sum(sent.sizes[place])))
    return results


def _lookup(ids: Tensor, offsets: Tensor | None, weights: Tensor | None, bag: bool, last_offset: bool) -> Lookup:
    if not bag:
        return Lookup(ids.reshape(-1), None, None, ids.numel(), None, 0, ids.shape)
    if offsets is None:
        flat_weights = None if weights is None else weights.reshape(-1)
        return Lookup(ids.reshape(-1), flat_weights, None, ids.size(0), ids.size(1), 0, ids.shape[:1])
    inside, weights = (lookup.in_bags(x, offsets, last_offset) for x in (ids, weights))
    assert inside is not None
    bags = offsets.size(0) - int(last_offset)
    return Lookup(inside, weights, offsets, bags, None, int(last_offset), (bags,))


def _pack(x: Lookup, wire: torch.dtype) -> Tensor:
    """Offsets, then ids. An id that the wire's dtype does not hold must not become another one that it holds."""
    ids = lookup.narrow_ids(x.ids) if wire == torch.int32 else x.ids.to(wire)
    return ids if x.offsets is None else torch.cat([x.offsets.to(wire), ids])


def _owned_by(sizes: list[list[int]], rank: int) -> list[int]:
    """The lookups of which a rank owns columns."""
    return [place for place, owned in enumerate(sizes) if owned[rank]]


def _weights_by_dtype(own: list[Lookup]) -> list[list[int]]:
    """The lookups with weights, those of one dtype together: each dtype is a message."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, x in enumerate(own):
        if x.weights is not None:
            by_dtype.setdefault(x.weights.dtype, []).append(place)
    return list(by_dtype.values())


def _to_owners(parts: Mapping[int, Tensor], sizes: list[list[int]]) -> tuple[Tensor, list[int]]:
    """For rank 0 the parts of the lookups that it owns columns of, for rank 1, ...; and how much goes to each rank."""
    by_rank = [[parts[place] for place in _owned_by(sizes, rank) if place in parts] for rank in range(len(sizes[0]))]
    send = [sum(part.size(0) for part in chosen) for chosen in by_rank]
    return torch.cat([part for chosen in by_rank for part in chosen]), send


def _exchange_ids(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    return x if len(send) == 1 else all_to_all(x, receive, send, group)


def _weights_of(own: list[Lookup], places: list[int]) -> dict[int, Tensor]:
    return {place: weights for place in places if (weights := own[place].weights) is not None}


def _send_equal(own: list[Lookup], packed: list[Tensor], sizes: list[list[int]], group: str) -> Sent:
    world, rank = len(sizes[0]), group_rank(group)
    mine = _owned_by(sizes, rank)
    data, send = _to_owners(dict(enumerate(packed)), sizes)
    data = _exchange_ids(data, [send[rank]] * world, send, group).view(world, send[rank])
    weights: dict[int, Tensor] = {}
    messages = []
    for places in _weights_by_dtype(own):
        x, send = _to_owners(_weights_of(own, places), sizes)
        x = exchange_jagged(x, [send[rank]] * world, send, world * send[rank], group)
        messages.append(x)
        here = [place for place in mine if place in places]
        pieces = x.view(world, send[rank]).split([own[place].ids.size(0) for place in here], 1)
        weights.update({place: piece.flatten() for place, piece in zip(here, pieces, strict=True)})
    arrived: list[Arrived | None] = [None] * len(own)
    for place, piece in zip(mine, data.split([packed[place].size(0) for place in mine], 1), strict=True):
        arrived[place] = _arrived_equal(own[place], piece, weights.get(place))
    elements = sum(own[place].rows * sizes[place][rank] for place in mine)
    return Sent(arrived, own, sizes, Way([], [elements] * world, world * elements), messages, group)


def _arrived_equal(x: Lookup, packed: Tensor, weights: Tensor | None) -> Arrived:
    """`packed` is (W, offsets and ids)."""
    world = packed.size(0)
    offsets, ids = packed.split([x.num_offsets, x.ids.size(0)], 1)
    ids = ids.flatten()
    if x.offsets is None:
        return Arrived(ids, _equal_bags(world * x.rows, x.bag_length, ids), weights, None)
    base = torch.arange(world, device=ids.device, dtype=ids.dtype).unsqueeze(1) * x.ids.size(0)
    bags = None
    if x.last_offset:
        numbers = torch.arange(world * x.num_offsets, device=ids.device)
        bags = numbers.view(world, x.num_offsets)[:, :-1].flatten()
    return Arrived(ids, (offsets + base).flatten(), weights, bags)


def _equal_bags(bags: int, length: int | None, like: Tensor) -> Tensor | None:
    """Where bags of equal length begin; None for ids that stand by themselves."""
    return None if length is None else torch.arange(bags, device=like.device, dtype=like.dtype) * length


def _send_ragged(own: list[Lookup], packed: list[Tensor], sizes: list[list[int]], group: str) -> Sent:
    world, rank = len(sizes[0]), group_rank(group)
    owned_by = [_owned_by(sizes, other) for other in range(world)]
    mine = owned_by[rank]
    dtypes = _weights_by_dtype(own)
    table = exchange_sizes(
        [(x.rows, x.num_offsets, x.ids.size(0)) for x in own],
        owned_by,
        rank,
        [sizes[place][rank] for place in mine],
        [[number for number, place in enumerate(mine) if place in places] for places in dtypes],
        group,
        packed[0].device,
    )
    known = table.read()
    data, send = _to_owners(dict(enumerate(packed)), sizes)
    data = _exchange_ids(data, known.elements, send, group)
    weights: dict[int, Tensor] = {}
    messages = []
    for message, (places, (receive, total)) in enumerate(zip(dtypes, known.weights, strict=True)):
        x, send = _to_owners(_weights_of(own, places), sizes)
        messages.append(exchange_jagged(x, receive, send, total, group))
        for number in table.weighted[message]:
            index = table.places_of_weights(message, number, known.ids[number])
            weights[mine[number]] = messages[-1].index_select(0, index)
    arrived: list[Arrived | None] = [None] * len(own)
    for number, place in enumerate(mine):
        arrived[place] = _arrived_ragged(own[place], data, table, known, number, weights.get(place))
    starts = [table.starts_back(number, known.rows[number]) for number in range(len(mine))]
    return Sent(arrived, own, sizes, Way(starts, known.send_back, known.total_back), messages, group)


def _arrived_ragged(
    x: Lookup, data: Tensor, table: Sizes, known: Numbers, number: int, weights: Tensor | None
) -> Arrived:
    ids = data.index_select(0, table.places_of_ids(number, known.ids[number]))
    if x.offsets is None:
        return Arrived(ids, _equal_bags(known.rows[number], x.bag_length, ids), weights, None)
    count = known.offsets[number]
    offsets = data.index_select(0, table.places_of_offsets(number, count))
    offsets = offsets + table.ids_before(number, count).to(offsets.dtype)
    bags = table.bags(number, known.rows[number]) if x.last_offset else None
    return Arrived(ids, offsets, weights, bags)
