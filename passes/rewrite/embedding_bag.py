"""embedding_bag, sharded by column.

    ids (B, L) -> all_gather_batch -> (W*B, L) -> embedding_bag on (V, d) -> (W*B, d) -> rearrange_columns -> (B, D)

With offsets, ids (N,) and offsets (B,) are gathered, each rank's offsets moved by the ids of the ranks before it.
Weights per sample travel like ids, in a gather of their own and in their own dtype.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from passes.ops import lookup, redistribute
from passes.rewrite.sandwich import Sandwich
from passes.traffic import FORWARD, itemsize_of, rows_of, shape_of


def rewrite(sandwich: Sandwich) -> None:
    """Replaces the call by its sandwich."""
    call = sandwich.call
    ids = sandwich.to_columns(call.input)
    columns = sandwich.add(
        f"{call.node.name}_columns",
        lookup.embedding_bag,
        ids,
        sandwich.lookup_shard(ids),
        _offsets(sandwich),
        _per_sample_weights(sandwich),
        at=sandwich.at,
        mode=call.options["mode"],
        **_last_offset(sandwich),
        **sandwich.lookup_options(),
    )
    sandwich.replace(sandwich.from_columns(columns, None, _bags(sandwich), sandwich.weight.size(1)))


def _offsets(sandwich: Sandwich) -> Any:
    call, context = sandwich.call, sandwich.context
    offsets = call.options["offsets"]
    if not (isinstance(offsets, fx.Node) and context.batch_sharded):
        return offsets
    sandwich.moves("all_gather", FORWARD, rows_of(offsets) * itemsize_of(offsets, torch.int64))
    return sandwich.add(
        f"{offsets.name}_all", lookup.all_gather_offsets, offsets, call.input, context.group, at=sandwich.at
    )


def _per_sample_weights(sandwich: Sandwich) -> Any:
    weights = sandwich.call.options["per_sample_weights"]
    if not isinstance(weights, fx.Node):
        return weights
    return sandwich.to_columns(weights, gather=redistribute.all_gather_optional, copy=redistribute.copy_optional)


def _last_offset(sandwich: Sandwich) -> dict[str, Any]:
    if not sandwich.call.options["include_last_offset"]:
        return {}
    batches = sandwich.context.world_size if sandwich.context.batch_sharded else 1
    return {"include_last_offset": True, "batches": batches}


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
