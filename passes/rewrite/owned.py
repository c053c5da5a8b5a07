"""Lookups whose columns are on some of the ranks: their ids travel to these, those of many lookups together.

    sent    = send([ids, ...], [offsets, ...], [weights, ...])         ids -> the ranks that own columns
    columns = embedding_bag(sent, 0, weight_shard)                     on those ranks; None elsewhere
    results = send_back(sent, [columns, ...])                          (B, D), ...

Lookups stand together where the ids of all of them are known before the first one's result is.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from passes import wire
from passes.layout import id_dtype
from passes.ops import owned
from passes.rewrite.sandwich import Sandwich
from passes.schedule import Schedule
from passes.sites import EMBEDDING_BAG, Call, Scope
from passes.traffic import itemsize_of, rows_of, shape_of


def groups(scope: Scope, calls: list[Call], parameters: Mapping[str, torch.nn.Parameter]) -> list[list[Call]]:
    """The calls in groups that can be exchanged together, in the order of the graph.

    Moves what the ids of a group depend on in front of its first call.
    """
    schedule = Schedule(scope.graph_module)
    made: list[list[Call]] = []
    for call in calls:
        weight = parameters[scope.parameters[call.weight]]
        if (
            made
            and _wire(weight) == _wire(parameters[scope.parameters[made[-1][0].weight]])
            and schedule.hoist(call.node, _operands(call), made[-1][0].node, [member.node for member in made[-1]])
        ):
            made[-1].append(call)
        else:
            made.append([call])
    return made


def _wire(weight: torch.nn.Parameter) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of what is sent back, and of ids."""
    return weight.dtype, id_dtype(weight.size(0))


def _operands(call: Call) -> list[fx.Node]:
    candidates = (call.input, call.weight, call.options.get("offsets"), call.options.get("per_sample_weights"))
    return [node for node in candidates if isinstance(node, fx.Node)]


def rewrite(made: list[Sandwich], number: int) -> None:
    """Replaces the calls of a group by one exchange."""
    first, context = made[0], made[0].context
    ragged = any(sandwich.ragged for sandwich in made)
    before = first.call.node
    for sandwich in made:
        sandwich.before = before
    calls = [sandwich.call for sandwich in made]
    rows = [context.plan.row(sandwich.weight_name) for sandwich in made]
    sent = first.add(
        f"lookups_{number}",
        owned.send,
        [call.input for call in calls],
        [call.options.get("offsets") for call in calls],
        [call.options.get("per_sample_weights") for call in calls],
        tables=[(*row.shape, row.ranks) for row in rows],
        bags=[call.op == EMBEDDING_BAG for call in calls],
        last_offsets=[bool(call.options.get("include_last_offset")) for call in calls],
        group=context.group,
        ragged=ragged,
        at=[sandwich.at for sandwich in made],
    )
    shards = [sandwich.shard(sandwich.call.weight) for sandwich in made]
    columns = [
        _look_up(sandwich, sent, place, shard) for place, (sandwich, shard) in enumerate(zip(made, shards, strict=True))
    ]
    back = first.add(f"results_{number}", owned.send_back, sent, columns, shards)
    results = [
        sandwich.add(f"{sandwich.call.node.name}_rows", operator.getitem, back, place)
        for place, sandwich in enumerate(made)
    ]
    for sandwich, rows_of_rank in zip(made, results, strict=True):
        _moves(sandwich, ragged)
        sandwich.replace(rows_of_rank)


def _look_up(sandwich: Sandwich, sent: fx.Node, place: int, shard: fx.Node) -> fx.Node:
    call = sandwich.call
    options: dict[str, Any] = {"at": sandwich.at, **sandwich.lookup_options()}
    if call.op == EMBEDDING_BAG:
        return sandwich.add(
            f"{call.node.name}_columns", owned.embedding_bag, sent, place, shard, mode=call.options["mode"], **options
        )
    return sandwich.add(f"{call.node.name}_columns", owned.embedding, sent, place, shard, **options)


def _moves(sandwich: Sandwich, ragged: bool) -> None:
    """Notes the part of one lookup in what the group puts on the wire.

    Every rank sends its ids to each owner but itself: with k owners, k * (W - 1) times.
    """
    call, context = sandwich.call, sandwich.context
    sizes = context.plan.row(sandwich.weight_name).sizes(context.world_size)
    owners = sum(size > 0 for size in sizes)
    if ragged:
        sandwich.note(wire.sent_sizes(owners))
    numbers = rows_of(call.input)
    results = rows_of(call.input)
    offsets, weights = call.options.get("offsets"), call.options.get("per_sample_weights")
    if isinstance(offsets, fx.Node):
        numbers += rows_of(offsets)
        results = rows_of(offsets) - int(bool(call.options["include_last_offset"]))
    elif call.op == EMBEDDING_BAG:
        shape = shape_of(call.input)
        results = sympy.Symbol(f"bags_{call.node.name}", integer=True, positive=True) if shape is None else shape[0]
    sandwich.note(wire.sent(numbers * _wire(sandwich.weight)[1].itemsize, owners))
    if isinstance(weights, fx.Node):
        nbytes = rows_of(weights) * itemsize_of(weights, sandwich.weight.dtype)
        sandwich.note(wire.sent(nbytes, owners, gradient=weights in sandwich.differentiable))
    itemsizes, gradient = sandwich.result_itemsizes(), call.result in sandwich.differentiable
    sandwich.note(wire.spread(results, sum(sizes), itemsizes, batch_sharded=True, gradient=gradient))
