"""embedding_bag, sharded by column.

Batch-sharded:

    ids (B, L), as int32 -> all_gather_batch -> (W*B, L) -> embedding_bag on (V, d) -> (W*B, d)
    -> rearrange_columns -> (B, D)

With offsets, ids (N,) and offsets (B,) are gathered, each rank's offsets moved by the ids of the ranks before it.
Weights per sample travel like ids, in a gather of their own and in their own dtype.
"""

from __future__ import annotations

from typing import Any

import sympy
from torch import fx

from passes import wire
from passes.ops import lookup, ragged, redistribute
from passes.rewrite.sandwich import Sandwich
from passes.traffic import rows_of, shape_of


def rewrite(sandwich: Sandwich) -> None:
    """Replaces the call by its sandwich."""
    call, context = sandwich.call, sandwich.context
    offsets, weights = call.options["offsets"], call.options["per_sample_weights"]
    own_ids, weights = (_in_bags(sandwich, x) for x in (_checked(sandwich), weights))
    id_counts, offset_counts = sandwich.counts(own_ids, offsets)
    bag_counts = _bag_counts(sandwich, id_counts, offset_counts)
    ids = sandwich.gather_ids(own_ids, id_counts)
    if isinstance(weights, fx.Node):
        weights = sandwich.gather_optional(weights, id_counts)
    columns = sandwich.add(
        f"{call.node.name}_columns",
        lookup.embedding_bag,
        ids,
        sandwich.lookup_shard(ids),
        _gather_offsets(sandwich, own_ids, id_counts, offset_counts),
        weights,
        at=sandwich.at,
        mode=call.options["mode"],
        **_last_offset(sandwich, bag_counts),
        **sandwich.lookup_options(),
    )
    if not sandwich.ragged:
        sandwich.replace(sandwich.spread(columns, None, _bags(sandwich), None))
        return
    name = f"{call.node.name}_rows"
    bags = (own_ids, offsets, bool(call.options["include_last_offset"]), bag_counts)
    if not sandwich.sharded:
        sandwich.replace(sandwich.add(name, ragged.own_bags_ragged, columns, *bags, context.group))
        return
    arguments, moves = (columns, *bags, sandwich.weight.size(1), context.group), sandwich.spread_moves(_bags(sandwich))
    sandwich.replace(sandwich.add(name, ragged.rearrange_bags_ragged, *arguments, moves=moves))


def _checked(sandwich: Sandwich) -> fx.Node:
    """The ids, after a check of all that the bag takes; a bag of ids alone is checked where they travel."""
    call, context = sandwich.call, sandwich.context
    offsets, weights = call.options["offsets"], call.options["per_sample_weights"]
    if not (isinstance(offsets, fx.Node) or isinstance(weights, fx.Node)):
        return call.input
    sandwich.checked = True
    options = {
        "include_last_offset": bool(call.options["include_last_offset"]),
        "ragged": sandwich.ragged,
        "replicated": not context.batch_sharded,
    }
    node = sandwich.once(
        f"{call.input.name}_checked",
        lookup.checked_ids,
        call.input,
        offsets,
        weights,
        context.group,
        at=sandwich.at,
        **{name: True for name, value in options.items() if value},  # type: ignore[arg-type]  # no option is `moves`
    )
    if "val" in call.input.meta:
        node.meta["val"] = call.input.meta["val"]
    return node


def _in_bags(sandwich: Sandwich, x: Any) -> Any:
    """`x`, without what lies in no bag."""
    offsets = sandwich.call.options["offsets"]
    if not (isinstance(x, fx.Node) and isinstance(offsets, fx.Node)):
        return x
    last = bool(sandwich.call.options["include_last_offset"])
    node = sandwich.once(f"{x.name}_in_bags", lookup.in_bags, x, offsets, last)
    if "val" in x.meta:
        node.meta["val"] = x.meta["val"]
    if x in sandwich.differentiable:
        sandwich.differentiable.add(node)
    return node


def _bag_counts(sandwich: Sandwich, id_counts: Any, offset_counts: Any) -> Any:
    """The node of the bags on every rank; None where all ranks have the same number."""
    if not sandwich.ragged:
        return None
    call = sandwich.call
    offsets, last = call.options["offsets"], bool(call.options["include_last_offset"])
    name = f"{call.node.name}_bag_counts"
    return sandwich.once(name, ragged.bag_counts, id_counts, offset_counts, offsets, last)


def _gather_offsets(sandwich: Sandwich, own_ids: fx.Node, id_counts: Any, offset_counts: Any) -> Any:
    call, context = sandwich.call, sandwich.context
    offsets = call.options["offsets"]
    if not (isinstance(offsets, fx.Node) and context.batch_sharded):
        return offsets
    group, name = context.group, f"{offsets.name}_all"
    nbytes = rows_of(offsets) * sandwich.wire_itemsize(offsets)
    moves = wire.gathered(nbytes, batch_sharded=True, gradient=False)
    narrow = sandwich.narrow(offsets)
    if sandwich.ragged:
        operands = (narrow, id_counts, offset_counts, group)
        return sandwich.once(name, ragged.all_gather_ragged_offsets, *operands, at=sandwich.at, moves=moves)
    gathered = sandwich.once(name, redistribute.all_gather_optional, narrow, group, moves=moves)
    name = f"{offsets.name}_moved"
    return sandwich.once(name, lookup.offsets_of_all, gathered, own_ids, group, at=sandwich.at)


def _last_offset(sandwich: Sandwich, bag_counts: Any) -> dict[str, Any]:
    if not sandwich.call.options["include_last_offset"]:
        return {}
    context = sandwich.context
    batches = context.world_size if context.batch_sharded else 1
    return {"include_last_offset": True, "batches": bag_counts if sandwich.ragged else batches}


def _bags(sandwich: Sandwich) -> sympy.Expr:
    """Bags on one rank."""
    call = sandwich.call
    offsets = call.options["offsets"]
    if isinstance(offsets, fx.Node):
        return rows_of(offsets) - int(bool(call.options["include_last_offset"]))
    shape = shape_of(call.input)
    if shape is None:
        return sympy.Symbol(f"bags_{call.node.name}", integer=True, positive=True)
    return shape[0]
