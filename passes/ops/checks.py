"""Checks of a batch, made where they cost next to nothing: in eager mode.

A compiled graph holds none of them: Inductor's own bounds checks see the gathered ids on every rank, and a check of
sizes would be one more collective per step. Both functions raise the same error on every rank, because every rank
looks at the same gathered numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from passes.errors import IdRangeError, InputError, describe
from passes.ops.collectives import all_gather, group_size

_MAX_DIMS = 8


def check_equal_sizes(x: Tensor, group: str, at: str) -> None:
    """Every rank's `x` has the same shape.

    Raises:
        InputError: otherwise, with the shape that each rank has.
    """
    if not _checkable(x):
        return
    if x.dim() > _MAX_DIMS:
        raise InputError(
            describe(
                at,
                f"the input has {x.dim()} dimensions",
                f"at most {_MAX_DIMS}",
                "Flatten the leading dimensions before the layer.",
            )
        )
    padding = [-1] * (_MAX_DIMS - x.dim())
    mine = torch.tensor([[*x.shape, *padding]], device=x.device)
    shapes = [tuple(s for s in row if s >= 0) for row in all_gather(mine, group).tolist()]
    if len(set(shapes)) > 1:
        listing = ", ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes))
        raise InputError(
            describe(
                at,
                f"the input's shape differs between the ranks ({listing})",
                f"one shape on all {group_size(group)} ranks",
                "Give every rank a batch of the same size (drop or pad the last, smaller one).",
            )
        )


def check_ids(ids: Tensor, num_embeddings: int, at: str) -> None:
    """Every id is a row of a table of `num_embeddings` rows.

    Raises:
        IdRangeError: otherwise, with the first such id.
    """
    if not _checkable(ids) or ids.numel() == 0:
        return
    lowest, highest = (int(end) for end in torch.aminmax(ids))
    if lowest < 0 or highest >= num_embeddings:
        bad = lowest if lowest < 0 else highest
        raise IdRangeError(
            describe(
                at,
                f"id {bad} is out of range",
                f"ids from 0 to {num_embeddings - 1}, the rows of the table",
                "Map unknown ids to a row of the table before the model.",
            )
        )


def _checkable(x: Tensor) -> bool:
    """False where values cannot be read: inside a compiled graph, and on fake and meta tensors."""
    return not (
        torch.compiler.is_compiling()
        or x.is_meta
        or isinstance(x, torch._subclasses.FakeTensor)
        or (type(x) is not Tensor and not isinstance(x, torch.nn.Parameter))
    )
