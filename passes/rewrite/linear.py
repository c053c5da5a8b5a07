"""linear, sharded by column: the feature axis is dim 0 of the weight (out, in) and of the bias (out,).

Batch-sharded:

    x (B, ..., in) -> all_gather_batch -> (W*B, ..., in) -> linear with (d, in), (d,) -> (W*B, ..., d)
    -> rearrange_columns -> (B, ..., out)

A weight may be sharded along its input axis instead: by the strategy "rowwise", or because it is tied to a table, whose
feature axis that is. Each rank then takes its columns of the input and has a part of the sum for every output; the bias
is added once, at the end:

    x (B, ..., in) -> rows_to_columns -> (W*B, ..., d) -> linear with (out, d) -> partial (W*B, ..., out)
    -> reduce_scatter_batch -> (B, ..., out) -> add_bias
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, fx

from passes import wire
from passes.ops import ragged, redistribute
from passes.ops.on_columns import add_bias
from passes.rewrite.sandwich import Sandwich
from passes.traffic import itemsize_of, rows_of


def rewrite(sandwich: Sandwich) -> None:
    """Replaces the call by its sandwich."""
    if sandwich.dim == 1:
        _rewrite_rowwise(sandwich)
        return
    call = sandwich.call
    (counts,) = sandwich.counts(call.input)
    x = sandwich.gather(call.input, counts)
    weight = sandwich.shard(call.weight)
    bias = None if call.bias is None else sandwich.shard(call.bias)
    columns = sandwich.add(f"{call.node.name}_columns", _linear(sandwich), x, weight, bias)
    rows = rows_of(call.input, feature_dims=1)
    sandwich.replace(sandwich.spread(columns, call.input, rows, counts))


def _rewrite_rowwise(sandwich: Sandwich) -> None:
    call, context = sandwich.call, sandwich.context
    (counts,) = sandwich.counts(call.input)
    x = _own_columns(sandwich, counts)
    partial = sandwich.add(f"{call.node.name}_partial", _linear(sandwich), x, sandwich.shard(call.weight))
    name, group = f"{call.node.name}_rows", context.group
    rows = rows_of(call.input, feature_dims=1)
    nbytes = rows * sandwich.weight.size(0) * itemsize_of(call.result, sandwich.weight.dtype)
    moves = wire.summed(nbytes, batch_sharded=context.batch_sharded)
    if not context.batch_sharded:
        out = sandwich.add(name, redistribute.all_reduce_partial, partial, group, moves=moves)
    elif sandwich.ragged:
        out = sandwich.add(name, ragged.reduce_scatter_ragged, partial, call.input, counts, group, moves=moves)
    else:
        scatter, arguments = redistribute.reduce_scatter_batch, (partial, call.input, group)
        out = sandwich.add(name, scatter, *arguments, moves=moves, feature_dims=1)
    if call.bias is not None:
        out = sandwich.add(f"{call.node.name}_biased", add_bias, out, sandwich.whole(call.bias))
    sandwich.replace(out)


def _linear(sandwich: Sandwich) -> Callable[..., Tensor]:
    return ragged.linear_ragged if sandwich.ragged else F.linear


def _own_columns(sandwich: Sandwich, counts: fx.Node | None) -> fx.Node:
    call, context = sandwich.call, sandwich.context
    name, columns, group = f"{call.input.name}_columns", sandwich.weight.size(1), context.group
    moves = wire.own_columns(
        rows_of(call.input, feature_dims=1),
        columns,
        itemsize_of(call.input, sandwich.weight.dtype),
        batch_sharded=context.batch_sharded,
        gradient=call.input in sandwich.differentiable,
        ragged=sandwich.ragged,
    )
    if not context.batch_sharded:
        return sandwich.once(name, redistribute.slice_columns, call.input, columns, group, moves=moves)
    if sandwich.ragged:
        return sandwich.once(name, ragged.rows_to_columns_ragged, call.input, counts, columns, group, moves=moves)
    return sandwich.once(name, redistribute.rows_to_columns, call.input, columns, group, at=sandwich.at, moves=moves)
