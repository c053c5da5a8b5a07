"""Checks of a batch, made where they cost next to nothing: in eager mode.

A compiled graph holds none of them: Inductor's own bounds checks see the gathered ids on every rank, and a check of
sizes would be one more collective per step. Every function raises the same error on every rank, because every rank
looks at the same gathered numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from passes.errors import IdRangeError, InputError, describe
from passes.ops.collectives import all_gather

_MAX_DIMS = 8
ID_DTYPES = (torch.int32, torch.int64)
_REMEDY = "Call the model in the same way on every rank."
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


@dataclasses.dataclass(frozen=True)
class _Signature:
    """What a rank tells the others of an operand. Dimensions beyond `_MAX_DIMS` are told by their product.

    Attributes:
        strided: False for a nested or sparse tensor, of which no more is told.
        dtype: None for one that is not in `_DTYPES`.
        requires_grad: as of the tensor.
        dims: the number of dimensions.
        shape: at most `_MAX_DIMS` numbers.
    """

    strided: bool
    dtype: torch.dtype | None
    requires_grad: bool
    dims: int
    shape: tuple[int, ...]

    @classmethod
    def row(cls, x: Tensor | None) -> list[int]:
        """The numbers that travel; the first says if there is an operand at all."""
        if x is None:
            return [0] * (5 + _MAX_DIMS)
        if not is_strided(x):
            return [1, 0, -1, 0, 0, *[-1] * _MAX_DIMS]
        shape = list(x.shape)
        if len(shape) > _MAX_DIMS:
            shape[_MAX_DIMS - 1 :] = [math.prod(shape[_MAX_DIMS - 1 :])]
        dtype = _DTYPES.index(x.dtype) if x.dtype in _DTYPES else -1
        return [1, 1, dtype, int(x.requires_grad), x.dim(), *shape, *[-1] * (_MAX_DIMS - len(shape))]

    @classmethod
    def of(cls, row: list[int]) -> _Signature | None:
        """The signature that a row tells."""
        present, strided, dtype, requires_grad, dims, *sizes = row
        if not present:
            return None
        shape = tuple(size for size in sizes if size >= 0)
        return cls(bool(strided), _DTYPES[dtype] if dtype >= 0 else None, bool(requires_grad), dims, shape)


Signatures = dict[str, "_Signature | None"]


def check_equal_sizes(x: Tensor, group: str, at: str) -> None:
    """Every rank's `x` has the same shape and dtype.

    Raises:
        InputError: otherwise, with what each rank has.
    """
    check_inputs([(x, at)], group)


def check_inputs(inputs: Sequence[tuple[Tensor, str]], group: str) -> None:
    """`check_equal_sizes` of several, each with its module path. One collective.

    Raises:
        InputError: otherwise, with what each rank has of the first that differs.
    """
    by_rank = _signatures([x for x, _ in inputs], group)
    if by_rank:
        for place, (_, at) in enumerate(inputs):
            _require_one_kind("the input", [rank[place] for rank in by_rank], at, ragged=False)


def check_operands(
    operands: Mapping[str, Tensor | None], group: str, at: str, *, ragged: bool = False
) -> list[Signatures]:
    """Every rank has the same operands, of the same dtypes and shapes. One collective.

    Args:
        operands: what each is called -> this rank's, or None.
        group: name of the process group.
        at: module path, for errors.
        ragged: True if dimension 0 may differ.

    Returns:
        What each rank has; nothing where values cannot be read.

    Raises:
        InputError: if the ranks differ, with what each rank has.
    """
    by_rank = [dict(zip(operands, rank, strict=True)) for rank in _signatures(list(operands.values()), group)]
    if by_rank:
        for name in operands:
            _require_one_kind(name, [rank[name] for rank in by_rank], at, ragged)
    return by_rank


def _signatures(operands: Sequence[Tensor | None], group: str) -> list[list[_Signature | None]]:
    """For each rank its operands'; nothing where values cannot be read."""
    present = [x for x in operands if x is not None]
    if torch.compiler.is_compiling() or not present or not all(is_readable(x) or not is_strided(x) for x in present):
        return []
    mine = torch.tensor([_Signature.row(x) for x in operands], device=present[0].device)
    rows = all_gather(mine, group).view(-1, *mine.shape).tolist()
    return [[_Signature.of(row) for row in rank] for rank in rows]


def _require_one_kind(name: str, by_rank: list[_Signature | None], at: str, ragged: bool) -> None:
    given = [rank for rank, signature in enumerate(by_rank) if signature is not None]
    signatures = [signature for signature in by_rank if signature is not None]
    everywhere = f"all {len(by_rank)} ranks"
    if given and len(given) < len(by_rank):
        raise InputError(
            describe(at, f"{name} is given on ranks {given} only", f"it on {everywhere}, or on none", _REMEDY)
        )
    if not all(signature.strided for signature in signatures):
        some = [rank for rank, signature in enumerate(signatures) if not signature.strided]
        fact = f"{name} is a nested or sparse tensor on ranks {some}"
        raise InputError(describe(at, fact, "a strided one", "Pass its values, and their offsets to a bag."))
    dtypes = [signature.dtype for signature in signatures]
    if len(set(dtypes)) > 1:
        raise _differs(at, f"the dtype of {name}", dtypes, f"one dtype on {everywhere}", _REMEDY)
    if len({signature.requires_grad for signature in signatures}) > 1:
        some = [rank for rank, signature in enumerate(signatures) if signature.requires_grad]
        fact = f"{name} requires a gradient on ranks {some} only"
        raise InputError(describe(at, fact, f"one answer on {everywhere}, which run one backward", _REMEDY))
    shapes = [signature.shape for signature in signatures]
    if ragged and len({(signature.dims, signature.shape[1:]) for signature in signatures}) > 1:
        raise _differs(at, f"the shape of {name}", shapes, f"one shape beyond dimension 0 on {everywhere}", _REMEDY)
    if not ragged and len({(signature.dims, signature.shape) for signature in signatures}) > 1:
        remedy = "Give every rank a batch of the same size, or call autoshard(..., ragged=True)."
        raise _differs(at, f"the shape of {name}", shapes, f"one shape on {everywhere}", remedy)


def _differs(at: str, what: str, by_rank: Sequence[object], expected: str, remedy: str) -> InputError:
    listing = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(by_rank))
    return InputError(describe(at, f"{what} differs between the ranks ({listing})", expected, remedy))


def check_bag(
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    group: str,
    at: str,
    *,
    include_last_offset: bool,
    ragged: bool,
    replicated: bool,
) -> None:
    """Every rank has the same operands of a bag, and they fit together.

    Offsets of batches that are not replicated are checked where they are gathered.

    Raises:
        InputError: otherwise, on every rank.
    """
    operands = {"ids": ids, "offsets": offsets, "per_sample_weights": weights}
    by_rank = check_operands(operands, group, at, ragged=ragged)
    if by_rank and offsets is not None and (offsets.dim() != 1 or offsets.dtype not in ID_DTYPES):
        raise InputError(
            describe(
                at,
                f"the offsets are of {offsets.dtype} and of the shape {tuple(offsets.shape)}",
                "torch.int32 or torch.int64, with one dimension",
                "Convert them with .flatten().long() before the layer.",
            )
        )
    for rank, signatures in enumerate(by_rank):
        of_ids, of_offsets, of_weights = signatures.values()
        if of_ids and of_weights and of_ids.shape != of_weights.shape:
            raise InputError(
                describe(
                    f"{at}, rank {rank}",
                    f"per_sample_weights have the shape {of_weights.shape}, ids {of_ids.shape}",
                    "one weight for each id",
                    "Give both the same shape.",
                )
            )
        if include_last_offset and of_offsets and of_offsets.shape == (0,):
            raise InputError(
                describe(
                    f"{at}, rank {rank}",
                    "there is no offset",
                    "at least one, the end of the last bag, with include_last_offset",
                    "Give a batch without bags the offsets [0].",
                )
            )
    if by_rank and replicated and offsets is not None:
        check_offsets(list(all_gather(offsets, group).chunk(len(by_rank))), [ids.size(0)] * len(by_rank), at)


def check_ids(ids: Tensor, num_embeddings: int, at: str, group: str | None = None) -> None:
    """Every id is a row of a table of `num_embeddings` rows.

    Args:
        ids: of one dtype on all ranks.
        num_embeddings: V.
        at: module path, for errors.
        group: name of the process group, where the ranks may have other ids; None where they are known to be equal.

    Raises:
        IdRangeError: otherwise, with such an id.
        InputError: if they are no integers.
    """
    if not is_readable(ids):
        return
    check_id_dtype(ids, at)
    ends = torch.aminmax(ids) if ids.numel() else (0, -1)
    lowest, highest = (int(end) for end in ends)
    if group is not None:
        everywhere = all_gather(torch.tensor([[lowest, highest]], device=ids.device), group)
        lowest, highest = int(everywhere[:, 0].min()), int(everywhere[:, 1].max())
    if lowest < 0 or highest >= num_embeddings:
        bad = lowest if lowest < 0 else highest
        rows = f"ids from 0 to {num_embeddings - 1}, the rows of the table"
        raise IdRangeError(
            describe(
                at,
                f"id {bad} is out of range",
                rows if num_embeddings else "no id: the table has no rows",
                "Map unknown ids to a row of the table before the model.",
            )
        )


def check_id_dtype(ids: Tensor, at: str) -> None:
    """Ids are integers that torch looks up.

    Raises:
        InputError: otherwise.
    """
    if ids.dtype not in ID_DTYPES:
        raise InputError(
            describe(
                at,
                f"the ids are of {ids.dtype}",
                "torch.int32 or torch.int64",
                "Convert them with .long() before the layer.",
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


def is_strided(x: Tensor) -> bool:
    """False for nested and sparse tensors."""
    return x.layout is torch.strided and not x.is_nested


def is_readable(x: Tensor) -> bool:
    """False where values cannot be read: inside a compiled graph, and on fake and meta tensors."""
    return not (
        torch.compiler.is_compiling()
        or x.is_meta
        or isinstance(x, torch._subclasses.FakeTensor)
        or (type(x) is not Tensor and not isinstance(x, torch.nn.Parameter))
    )
