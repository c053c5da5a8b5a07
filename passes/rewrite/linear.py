"""linear, sharded by column: the feature axis is dim 0 of the weight (out, in) and of the bias (out,).

Batch-sharded:

    x (B, ..., in) -> all_gather_batch -> (W*B, ..., in) -> linear with (d, in), (d,) -> (W*B, ..., d)
    -> rearrange_columns -> (B, ..., out)
"""

from __future__ import annotations

import torch.nn.functional as F

from passes.rewrite.sandwich import Sandwich
from passes.traffic import rows_of


def rewrite(sandwich: Sandwich) -> None:
    """Replaces the call by its sandwich."""
    call = sandwich.call
    (counts,) = sandwich.counts(call.input)
    x = sandwich.gather(call.input, counts)
    weight = sandwich.shard(call.weight)
    bias = None if call.bias is None else sandwich.shard(call.bias)
    columns = sandwich.add(f"{call.node.name}_columns", F.linear, x, weight, bias)
    rows = rows_of(call.input, feature_dims=1)
    sandwich.replace(sandwich.spread(columns, call.input, rows, counts))
