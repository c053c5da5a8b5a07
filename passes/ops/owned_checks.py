"""Checks of lookups before they are sent to their owners, in eager mode.

An owner alone sees the ids that came to it; so every rank tells all others a few facts about its own input, and all of
them judge the same table and raise the same error.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from passes.errors import AutoshardError, IdRangeError, InputError, describe
from passes.ops.checks import ID_DTYPES, is_readable
from passes.ops.collectives import all_gather, group_size

if TYPE_CHECKING:
    from passes.ops.owned import Lookup

_WEIGHTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FACTS = (
    "ids_dtype",
    "weights_dtype",  # -1 without weights
    "num_ids",
    "num_weights",
    "rows",
    "bag_length",  # -1 where bags have none
    "lowest",
    "highest",
    "offsets_dtype",  # -1 without offsets
    "first_offset",
    "ascending",
    "last_offset",
)


def check_lookups(
    own: Sequence[Lookup],
    ids: Sequence[Tensor],
    num_embeddings: Sequence[int],
    at: Sequence[str],
    group: str,
    *,
    ragged: bool,
) -> None:
    """What every rank brings is what its lookups take, and of one kind on all ranks.

    Args:
        own: this rank's lookups.
        ids: as they were given; those that no bag holds are looked at too, as torch looks at them.
        num_embeddings: rows of their tables.
        at: module paths, for errors.
        group: name of the process group.
        ragged: True if the ranks' batches may differ in size.

    Raises:
        IdRangeError: if an id is not a row of the table.
        InputError: for anything else.
    """
    if not is_readable(ids[0]):
        return
    facts = [_facts(x, given) for x, given in zip(own, ids, strict=True)]
    table = all_gather(torch.tensor([facts], device=ids[0].device), group).tolist()
    for place, (rows, where) in enumerate(zip(num_embeddings, at, strict=True)):
        by_rank = [dict(zip(_FACTS, row[place], strict=True)) for row in table]
        for rank, found in enumerate(by_rank):
            _check_rank(found, rows, f"{where}, rank {rank}")
        _check_together(by_rank, where, ragged, group_size(group))


def check_weights(own: Lookup, dtype: torch.dtype, mode: str, at: str) -> None:
    """torch takes weights per sample of the table's dtype, in mode "sum"; an owner alone would find that out.

    Raises:
        InputError: for others.
    """
    if own.weights is None:
        return
    if mode != "sum":
        fact, expected = f'weights per sample in mode "{mode}"', 'mode "sum"'
        raise InputError(describe(at, fact, expected, "Weight the rows after the lookup."))
    if own.weights.dtype != dtype:
        fact, expected = f"weights per sample of {own.weights.dtype}", f"{dtype}, the dtype of the table"
        raise InputError(describe(at, fact, expected, "Convert them to it."))


def _facts(x: Lookup, given: Tensor) -> list[int]:
    lowest, highest = (0, 0) if given.numel() == 0 else (int(end) for end in torch.aminmax(given))
    facts = [_place(given.dtype, ID_DTYPES), -1, x.ids.size(0), x.ids.size(0), x.rows]
    facts += [-1 if x.bag_length is None else x.bag_length, lowest, highest]
    if x.weights is not None:
        facts[1], facts[3] = _place(x.weights.dtype, _WEIGHTS), x.weights.size(0)
    if x.offsets is None:
        return [*facts, -1, 0, 1, 0]
    values = x.offsets.tolist() or [0]
    ascending = all(a <= b for a, b in itertools.pairwise(values))
    return [*facts, _place(x.offsets.dtype, ID_DTYPES), int(values[0]), int(ascending), int(values[-1])]


def _check_rank(found: dict[str, int], num_embeddings: int, place: str) -> None:
    kind: type[AutoshardError] = InputError
    if found["ids_dtype"] == -2:
        fact, expected = "the ids are no integers", "torch.int32 or torch.int64"
        remedy = "Convert them with .long() before the layer."
    elif found["lowest"] < 0 or found["highest"] >= num_embeddings:
        bad = found["lowest"] if found["lowest"] < 0 else found["highest"]
        kind, fact = IdRangeError, f"id {bad} is out of range"
        expected = f"ids from 0 to {num_embeddings - 1}, the rows of the table"
        remedy = "Map unknown ids to a row of the table before the model."
    elif found["weights_dtype"] == -2:
        fact, expected = "the weights per sample are no floating point numbers", "the dtype of the table"
        remedy = "Convert them to it."
    elif found["num_weights"] != found["num_ids"]:
        fact, expected = f"{found['num_weights']} weights per sample", f"{found['num_ids']}, one for each id"
        remedy = "Give weights of the shape of the ids."
    elif found["offsets_dtype"] == -2 or found["first_offset"] or not found["ascending"]:
        fact, expected = "the offsets do not begin with 0, or do not ascend", "integers that do"
        remedy = "Compute the offsets from the lengths: torch.cumsum(lengths, 0) - lengths."
    elif found["offsets_dtype"] >= 0 and found["rows"] > 0 and found["last_offset"] > found["num_ids"]:
        fact = f"the last offset is {found['last_offset']}, with {found['num_ids']} ids"
        expected = "offsets of at most the number of ids"
        remedy = "Compute the offsets from the lengths: torch.cumsum(lengths, 0) - lengths."
    else:
        return
    raise kind(describe(place, fact, expected, remedy))


def _check_together(by_rank: list[dict[str, int]], at: str, ragged: bool, world: int) -> None:
    same = {"ids_dtype": "dtype of the ids", "weights_dtype": "dtype of the weights per sample"}
    same |= {"bag_length": "length of the bags", "offsets_dtype": "dtype of the offsets"}
    if not ragged:
        same |= {"num_ids": "number of ids", "rows": "number of bags or rows"}
    for fact, name in same.items():
        values = [found[fact] for found in by_rank]
        if len(set(values)) > 1:
            listing = ", ".join(f"rank {rank}: {_shown(fact, value)}" for rank, value in enumerate(values))
            remedy = "Give every rank its batch in the same form."
            if fact in ("num_ids", "rows"):
                remedy = "Give every rank a batch of the same size, or call autoshard(..., ragged=True)."
            expected = f"the same on all {world} ranks"
            raise InputError(describe(at, f"the {name} differs between the ranks ({listing})", expected, remedy))


def _shown(fact: str, value: int) -> object:
    if not fact.endswith("dtype"):
        return value
    return "none" if value < 0 else (_WEIGHTS if fact.startswith("weights") else ID_DTYPES)[value]


def _place(dtype: torch.dtype, among: Sequence[torch.dtype]) -> int:
    return among.index(dtype) if dtype in among else -2
