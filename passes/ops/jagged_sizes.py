"""The first message of a jagged exchange: what every rank must know of the others before lengths and ids can travel.

A fixed number of integers to every rank, whatever the input is: so a rank with bad input takes part, all ranks see the
same facts, and all raise the same error, which costs no collective of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from passes.errors import InputError, describe

ID_DTYPES = (torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16)
WEIGHT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, *ID_DTYPES)

# The first column is common to all lists, and these follow for each of them.
COLUMNS = (
    "num_keys",  # -1 for a list that is None
    "values_dtype",  # a place in ID_DTYPES
    "weights_dtype",  # a place in WEIGHT_DTYPES, -1 for none
    "per_key",  # 1 if the features have strides of their own
    "stride",
    "num_values",
    "num_negative",  # lengths below 0
    "lengths_sum",
    "num_lengths",  # to this destination
    "num_ids",  # to this destination
)


@dataclass(frozen=True)
class JaggedList:
    """Lists of ids of several features; the features are ordered by the rank that owns them.

    Attributes:
        lengths: (sum of strides,), key-major, int32 or int64.
        values: (N,), the ids.
        weights: (N,), or None.
        strides: the samples of each feature.
        per_key: whether these may differ.
    """

    lengths: Tensor
    values: Tensor
    weights: Tensor | None
    strides: list[int]
    per_key: bool


@dataclass(frozen=True)
class Features:
    """What each rank owns of one list, the same on all ranks.

    Attributes:
        name: of the list, for errors.
        per_rank: W numbers of features.
    """

    name: str
    per_rank: tuple[int, ...]

    def by_rank(self, per_feature: list[int]) -> list[int]:
        """Numbers of each feature -> their sums over the features of each rank."""
        sums, start = [], 0
        for count in self.per_rank:
            sums.append(sum(per_feature[start : start + count]))
            start += count
        return sums


def column(table: Tensor, which: int, name: str) -> Tensor:
    """(W, K) -> (W,): one column of the list with this number."""
    return table[:, 1 + which * len(COLUMNS) + COLUMNS.index(name)]


def sizes_message(lists: Sequence[JaggedList | None], features: Sequence[Features], agreement: int) -> Tensor:
    """(W, K) int64: a row for each destination.

    Args:
        lists: this rank's input; at least one is not None.
        features: of each list.
        agreement: a number that must be the same on all ranks.
    """
    device = next(x for x in lists if x is not None).lengths.device
    world = len(features[0].per_rank)
    columns = [torch.full((world, 1), agreement, dtype=torch.int64, device=device)]
    for x, owned in zip(lists, features, strict=True):
        if x is None:
            columns.append(torch.full((world, len(COLUMNS)), -1, dtype=torch.int64, device=device))
            continue
        weights_dtype = -1 if x.weights is None else _place(x.weights.dtype, WEIGHT_DTYPES)
        stride = -1 if x.per_key or not x.strides else x.strides[0]
        facts = [len(x.strides), _place(x.values.dtype, ID_DTYPES), weights_dtype, int(x.per_key), stride]
        known = torch.tensor([*facts, x.values.size(0)], device=device)
        summed = torch.stack([(x.lengths < 0).sum(), x.lengths.sum()])
        columns.append(torch.cat([known, summed]).expand(world, -1))
        if len(x.strides) == sum(owned.per_rank):
            num_lengths = owned.by_rank(x.strides)
            ids = torch.stack([part.sum() for part in x.lengths.split(num_lengths)])
            columns.append(torch.stack([torch.tensor(num_lengths, device=device), ids], 1))
        else:
            columns.append(torch.zeros(world, 2, dtype=torch.int64, device=device))
    return torch.cat(columns, 1)
