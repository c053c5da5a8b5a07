"""max_norm: rows that are looked up are scaled to a norm of at most `max_norm`, in place, before the lookup.

The norm is that of the whole row (all D columns), so each rank gives the part of its d columns and the parts meet in
one all_reduce of a number per id:

    p            part of a rank        reduction    norm
    inf, -inf    max, min of |w|       max, min     n
    0            count of w != 0       sum          n
    otherwise    sum of |w|^p          sum          n^(1/p)

Definition: `aten::embedding_renorm_`: w * max_norm / (norm + 1e-7) where norm > max_norm, once per distinct id. Ids
that occur twice write equal values, so no `unique` is needed and every shape is known.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from passes.ops import checks
from passes.ops.collectives import all_reduce


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that norms of such weights are added up in."""
    return torch.promote_types(dtype, torch.float32)


def renorm(parameter: Tensor, ids: Tensor, max_norm: float, norm_type: float, group: str | None, *, at: str) -> Tensor:
    """Renorms the rows of `ids` in place and returns the parameter.

    It stands before the parameter is made local: a view that autograd has handed out must not change any more.

    Args:
        parameter: (V, D), a DTensor sharded along dim 1, of which this rank holds (V, d); or replicated.
        ids: (...), the same on all ranks, all of them rows of the table.
        max_norm: largest norm a row may have.
        norm_type: p, any float.
        group: name of the process group that shares the columns; None if this rank holds all of them.
        at: module path, for errors.

    Raises:
        IdRangeError: in eager mode, on all ranks, if an id is not a row of the table, which is then as it was.
    """
    checks.check_ids(ids, parameter.size(0), at)
    with torch.no_grad():
        # In inference mode a DTensor cannot be detached, but its local tensor can.
        weight = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
        ids = ids.flatten().long()
        rows = weight[ids].to(norm_dtype(weight.dtype))
        norms = _norms(rows, norm_type, group)
        norms = norms.double()  # torch's kernel takes the scale in double, and rounds it to the weight's dtype
        scale = torch.where(norms > max_norm, max_norm / (norms + 1e-7), torch.ones_like(norms))
        weight.index_put_((ids,), (rows * scale.to(weight.dtype).unsqueeze(1)).to(weight.dtype))
    return parameter


def _norms(rows: Tensor, p: float, group: str | None) -> Tensor:
    """(N, d) -> (N,), the norms of whole rows."""
    magnitudes = rows.abs()
    if math.isinf(p):
        # A rank without columns gives the neutral element.
        padded = torch.nn.functional.pad(magnitudes, (0, 1), value=0.0 if p > 0 else math.inf)
        part = padded.amax(1) if p > 0 else padded.amin(1)
        return part if group is None else _reduce_extreme(part, group, "max" if p > 0 else "min")
    if p == 0:
        return _reduce((rows != 0).to(rows.dtype).sum(1), group)
    return _reduce(magnitudes.pow(p).sum(1), group).pow(1 / p)


def _reduce(part: Tensor, group: str | None) -> Tensor:
    return part if group is None else all_reduce(part, group)


def _reduce_extreme(part: Tensor, group: str, op: str) -> Tensor:
    """The "max" or "min" of magnitudes, as their bits, which are in the same order.

    A reduction of floats may lose a NaN, which has to win: it is the largest number, or -1, whose bits are NaN as well.
    """
    integers = torch.int32 if part.dtype is torch.float32 else torch.int64
    winner = torch.iinfo(integers).max if op == "max" else -1
    bits = part.view(integers).masked_fill(part.isnan(), winner)
    return all_reduce(bits, group, op).view(part.dtype)
