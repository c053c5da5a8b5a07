"""embedding, sharded by column.

ids (B, ...) -> all_gather_batch -> (W*B, ...) -> embedding on (V, d) -> (W*B, ..., d) -> rearrange_columns -> (B, ...,
D)
"""

from __future__ import annotations

from passes.ops import lookup
from passes.rewrite.sandwich import Sandwich
from passes.traffic import rows_of


def rewrite(sandwich: Sandwich) -> None:
    """Replaces the call by its sandwich."""
    call = sandwich.call
    ids = sandwich.to_columns(call.input)
    columns = sandwich.add(
        f"{call.node.name}_columns",
        lookup.embedding,
        ids,
        sandwich.lookup_shard(ids),
        at=sandwich.at,
        **sandwich.lookup_options(),
    )
    rows = rows_of(call.input)
    sandwich.replace(sandwich.from_columns(columns, call.input, rows, sandwich.weight.size(1)))
