"""Checks of a batch, made where they cost next to nothing: in eager mode.

A compiled graph holds none of them: Inductor's own bounds checks see the gathered ids on every rank, and a check of
sizes would be one more collective per step. Both functions raise the same error on every rank, because every rank
looks at the same gathered numbers.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from passes.errors import IdRangeError, InputError, describe
from passes.ops.collectives import all_gather, group_size

_MAX_DIMS = 8
_DTYPES = (
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.bool,
)


def check_equal_sizes(x: Tensor, group: str, at: str) -> None:
    """Every rank's `x` has the same shape and dtype.

    Raises:
        InputError: otherwise, with what each rank has.
    """
    if not is_readable(x):
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
    mine = torch.tensor([[_DTYPES.index(x.dtype) if x.dtype in _DTYPES else -1, *x.shape, *padding]], device=x.device)
    dtypes, shapes = [], []
    for dtype, *sizes in all_gather(mine, group).tolist():
        dtypes.append(_DTYPES[dtype] if dtype >= 0 else None)
        shapes.append(tuple(size for size in sizes if size >= 0))
    if len(set(dtypes)) > 1:
        listing = ", ".join(f"rank {rank}: {dtype}" for rank, dtype in enumerate(dtypes))
        raise InputError(
            describe(
                at,
                f"the input's dtype differs between the ranks ({listing})",
                f"one dtype on all {group_size(group)} ranks",
                "Give every rank inputs of the same dtype.",
            )
        )
    if len(set(shapes)) > 1:
        listing = ", ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes))
        raise InputError(
            describe(
                at,
                f"the input's shape differs between the ranks ({listing})",
                f"one shape on all {group_size(group)} ranks",
                "Give every rank a batch of the same size, or call autoshard(..., ragged=True).",
            )
        )


def check_ids(ids: Tensor, num_embeddings: int, at: str) -> None:
    """Every id is a row of a table of `num_embeddings` rows.

    Raises:
        IdRangeError: otherwise, with such an id.
        InputError: if they are no integers.
    """
    if not is_readable(ids):
        return
    if ids.dtype not in (torch.int32, torch.int64):
        raise InputError(
            describe(
                at,
                f"the ids are of {ids.dtype}",
                "torch.int32 or torch.int64",
                "Convert them with .long() before the layer.",
            )
        )
    if ids.numel() == 0:
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


def check_sparse(sparse: bool, at: str) -> None:
    """Sparse gradients run in eager mode: Dynamo takes every gradient of a custom Function for a dense one.

    Raises:
        InputError: inside of torch.compile, for a lookup with sparse=True.
    """
    if sparse and torch.compiler.is_compiling():
        raise InputError(
            describe(
                at,
                "a table with sparse gradients is compiled",
                "sparse=True in eager mode only",
                "Set sparse=False for a compiled model: the gradient is then dense.",
            )
        )


def check_offsets(by_rank: list[Tensor], id_counts: list[int], at: str) -> None:
    """Every rank's offsets begin with 0, ascend, and stay within its ids.

    Args:
        by_rank: the offsets of each rank, the same list on all ranks.
        id_counts: the ids of each rank.
        at: module path, for errors.

    Raises:
        InputError: otherwise.
    """
    if not is_readable(by_rank[0]):
        return
    for rank, (offsets, ids) in enumerate(zip(by_rank, id_counts, strict=True)):
        values = offsets.tolist()
        fact = ""
        if values and values[0] != 0:
            fact = f"the first offset is {values[0]}"
        elif any(b < a for a, b in itertools.pairwise(values)):
            fact = "the offsets do not ascend"
        elif values and values[-1] > ids:
            fact = f"the last offset is {values[-1]}, with {ids} ids"
        if fact:
            raise InputError(
                describe(
                    f"{at}, rank {rank}",
                    fact,
                    "offsets that begin with 0, ascend, and are at most the number of ids",
                    "Compute the offsets from the lengths: torch.cumsum(lengths, 0) - lengths.",
                )
            )


def is_readable(x: Tensor) -> bool:
    """False where values cannot be read: inside a compiled graph, and on fake and meta tensors."""
    return not (
        torch.compiler.is_compiling()
        or x.is_meta
        or isinstance(x, torch._subclasses.FakeTensor)
        or (type(x) is not Tensor and not isinstance(x, torch.nn.Parameter))
    )
