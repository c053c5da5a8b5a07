"""The first message of a jagged exchange: what every rank must know of the others before lengths and ids can travel.

It is a fixed number of integers for each rank, whatever the input: so a rank with bad input takes part, all ranks look
at the same facts, and all raise the same error, which costs no collective of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from passes.errors import InputError, describe
from passes.ops.jagged import segment_sums

ID_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
WEIGHT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, *ID_DTYPES)

# What a dtype that is in none of these has as its place; -1 stands for what is left out.
_UNKNOWN = -2

# For each list, behind a first column that is common to all. They are -1 for a list that is left out.
_COLUMNS = (
    "num_keys",
    "values_dtype",
    "weights_dtype",
    "stride",  # -1 where each key has its own
    "num_values",
    "num_negative",  # lengths below 0
    "length_sum",
    "num_lengths",  # to this destination
    "num_ids",  # to this destination
)


@dataclass(frozen=True)
class JaggedList:
    """Lists of ids of several features, which are ordered by the rank that owns them.

    Attributes:
        lengths: (sum of strides,), key-major, int32 or int64.
        values: (N,), the ids.
        weights: (N,), or None.
        strides: the samples of each feature.
        stride: the samples of every feature; None where they may differ.
    """

    lengths: Tensor
    values: Tensor
    weights: Tensor | None
    strides: list[int]
    stride: int | None


@dataclass(frozen=True)
class Sizes:
    """(W, K) int64, a row for each destination or from each source, with columns for each of the lists."""

    table: Tensor
    names: list[str]

    def column(self, name: str, column: str) -> Tensor:
        """(W,)."""
        return self.table[:, 1 + self.names.index(name) * len(_COLUMNS) + _COLUMNS.index(column)]


def sum_by_rank(by_feature: Sequence[int], features_per_rank: Sequence[int]) -> list[int]:
    """Numbers for each feature -> their sums over the features of each rank."""
    sums, start = [], 0
    for count in features_per_rank:
        sums.append(sum(by_feature[start : start + count]))
        start += count
    return sums


def sizes_message(
    lists: Mapping[str, JaggedList], features: Mapping[str, Sequence[int]], agreement: int, device: torch.device
) -> Sizes:
    """What this rank tells each of the others.

    Args:
        lists: by name, some of those in `features`.
        features: for each list how many features each rank owns.
        agreement: a number that must be the same on all ranks.
        device: where the lists are.
    """
    world = len(next(iter(features.values())))
    parts = [torch.full((world, 1), agreement, device=device)]
    for name, per_rank in features.items():
        if name not in lists:
            parts.append(torch.full((world, len(_COLUMNS)), -1, device=device))
            continue
        x = lists[name]
        facts = [
            len(x.strides),
            _place(x.values.dtype, ID_DTYPES),
            -1 if x.weights is None else _place(x.weights.dtype, WEIGHT_DTYPES),
            -1 if x.stride is None else x.stride,
            x.values.size(0),
        ]
        summed = [(x.lengths < 0).sum(0, keepdim=True), x.lengths.sum(0, keepdim=True)]
        to_all = torch.cat([torch.tensor(facts, device=device), *summed])
        # Keys that do not fit the features go nowhere: `check_sizes` then says so.
        fits = len(x.strides) == sum(per_rank)
        num_lengths = torch.tensor(sum_by_rank(x.strides, per_rank) if fits else [0] * world, device=device)
        to_each = torch.stack([num_lengths, segment_sums(x.lengths, num_lengths)], 1)
        parts.append(torch.cat([to_all.expand(world, -1), to_each], 1))
    return Sizes(torch.cat(parts, 1), list(features))


def check_sizes(table: list[list[int]], features: Mapping[str, Sequence[int]], at: str) -> None:
    """The lists of all ranks fit the features, themselves and one another.

    Args:
        table: the row that came from each rank; all but the columns for this destination are the same on all ranks.
        features: for each list how many features each rank owns.
        at: for errors.

    Raises:
        InputError: otherwise, the same on all ranks.
    """
    agreements = [row[0] for row in table]
    if len(set(agreements)) > 1:
        other = next(rank for rank, number in enumerate(agreements) if number != agreements[0])
        raise InputError(
            describe(
                at,
                f"the features per rank, or the stagger, of rank {other} are not those of rank 0",
                "the same on all ranks",
                "They say who owns which keys: give every rank the same ones.",
            )
        )
    for which, (name, per_rank) in enumerate(features.items()):
        start = 1 + which * len(_COLUMNS)
        rows = [dict(zip(_COLUMNS, row[start:], strict=False)) for row in table]
        absent = [rank for rank, row in enumerate(rows) if row["num_keys"] < 0]
        if absent and len(absent) < len(rows):
            raise InputError(
                describe(
                    f"{at}, {name}, rank {absent[0]}",
                    "the list is None, while another rank has one",
                    "it on all ranks or on none",
                    "Give a rank without samples a list with all keys and no lengths.",
                )
            )
        if not absent:
            for rank, row in enumerate(rows):
                _check_row(row, per_rank, f"{at}, {name}, rank {rank}")
            _check_together(rows, f"{at}, {name}")


def _check_row(row: dict[str, int], per_rank: Sequence[int], place: str) -> None:
    if row["num_keys"] != sum(per_rank):
        fact, expected = f"{row['num_keys']} keys", f"{sum(per_rank)}, for {list(per_rank)} features per rank"
        remedy = "Order the keys by the rank they go to, and count them for each rank."
    elif row["values_dtype"] < 0:
        fact, expected = "the values are no ids", f"one of {_names(ID_DTYPES)}"
        remedy = "Convert ids with .long(), and give scores as weights."
    elif row["weights_dtype"] == _UNKNOWN:
        fact, expected = "weights of a dtype that cannot travel", f"one of {_names(WEIGHT_DTYPES)}"
        remedy = "Convert them, with .float() say."
    elif row["num_negative"]:
        fact, expected = f"{row['num_negative']} of the lengths are negative", "lengths of at least 0"
        remedy = "Lengths that were computed from offsets are negative where these do not ascend."
    elif row["length_sum"] != row["num_values"]:
        fact, expected = f"the lengths add up to {row['length_sum']}", f"{row['num_values']}, the number of values"
        remedy = "Compute the lengths, or offsets, from the values that they describe."
    else:
        return
    raise InputError(describe(place, fact, expected, remedy))


def _check_together(rows: list[dict[str, int]], place: str) -> None:
    named: dict[str, list[object]] = {
        "dtype of the ids": [ID_DTYPES[row["values_dtype"]] for row in rows],
        "dtype of the weights": [(*WEIGHT_DTYPES, None)[row["weights_dtype"]] for row in rows],
        "kind of stride": ["each key its own" if row["stride"] < 0 else "one for all keys" for row in rows],
    }
    for what, found in named.items():
        if len(set(found)) > 1:
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(found))
            raise InputError(
                describe(
                    place,
                    f"the {what} differs between the ranks ({listing})",
                    "the same on all ranks",
                    "Give every rank its batch in the same form.",
                )
            )


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _place(dtype: torch.dtype, among: Sequence[torch.dtype]) -> int:
    return among.index(dtype) if dtype in among else _UNKNOWN
