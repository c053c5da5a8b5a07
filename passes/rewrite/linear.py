"""linear, sharded by column: the feature axis is dim 0 of the weight (out, in) and of the bias (out,).

Batch-sharded:

    x (B, ..., in) -> all_gather_batch -> (W*B, ..., in) -> linear with (d, in), (d,) -> (W*B, ..., d)
    -> rearrange_columns -> (B, ..., out)

A weight that is tied to a table (V, D) is sharded along the table's feature axis, the linear's input axis. Each rank
then takes its columns of the input and has a part of the sum for every output; the bias is added once, at the end:

    x (B, ..., D) -> rows_to_columns -> (W*B, ..., d) -> linear with (V, d) -> partial (W*B, ..., V)
    -> reduce_scatter_batch -> (B, ..., V)
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, fx

from passes import wire
from passes.ops import ragged, redistribute
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
    if not context.batch_sharded:
        out = sandwich.add(name, redistribute.all_reduce_partial, partial, group)
    elif sandwich.ragged:
        out = sandwich.add(name, ragged.reduce_scatter_ragged, partial, call.input, counts, group)
    else:
        out = sandwich.add(name, redistribute.reduce_scatter_batch, partial, call.input, group)
    _note_moves(sandwich)
    if call.bias is not None:
        bias = sandwich.add(
            f"{call.bias.name}_local", redistribute.replicate_parameter, call.bias, group, context.reduction
        )
        out = sandwich.add(f"{call.node.name}_biased", operator.add, out, bias)
    sandwich.replace(out)


def _linear(sandwich: Sandwich) -> Callable[..., Tensor]:
    return ragged.linear_ragged if sandwich.ragged else F.linear


def _own_columns(sandwich: Sandwich, counts: fx.Node | None) -> fx.Node:
    call, context = sandwich.call, sandwich.context
    name, columns, group = f"{call.input.name}_columns", sandwich.weight.size(1), context.group
    if not context.batch_sharded:
        return sandwich.add(name, redistribute.slice_columns, call.input, columns, group)
    if sandwich.ragged:
        return sandwich.add(name, ragged.rows_to_columns_ragged, call.input, counts, columns, group)
    return sandwich.add(name, redistribute.rows_to_columns, call.input, columns, group, at=sandwich.at)


def _note_moves(sandwich: Sandwich) -> None:
    call, weight = sandwich.call, sandwich.weight
    rows = rows_of(call.input, feature_dims=1)
    out = rows * weight.size(0) * itemsize_of(call.result, weight.dtype)
    x = rows * weight.size(1) * itemsize_of(call.input, weight.dtype)
    batch_sharded = sandwich.context.batch_sharded
    gradient = call.input in sandwich.differentiable
    sandwich.note(wire.own_columns(x, batch_sharded=batch_sharded, gradient=gradient))
    sandwich.note(wire.summed(out, batch_sharded=batch_sharded))
