"""embedding, sharded by column.

Batch-sharded:

    ids (B, ...), as int32 -> all_gather_batch -> (W*B, ...) -> embedding on (V, d) -> (W*B, ..., d)
    -> rearrange_columns -> (B, ..., D)
"""

from __future__ import annotations

from passes.ops import lookup
from passes.rewrite.sandwich import Sandwich
from passes.traffic import rows_of


def rewrite(sandwich: Sandwich) -> None:
    """Replaces the call by its sandwich."""
    call = sandwich.call
    (counts,) = sandwich.counts(call.input)
    ids = sandwich.gather_ids(call.input, counts)
    columns = sandwich.add(
        f"{call.node.name}_columns",
        lookup.embedding,
        ids,
        sandwich.lookup_shard(ids),
        at=sandwich.at,
        **sandwich.lookup_options(),
    )
    sandwich.replace(sandwich.spread(columns, call.input, rows_of(call.input), counts))
