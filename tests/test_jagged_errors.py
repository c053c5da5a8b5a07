"""Bad input to the jagged exchange: every rank hears of it, in the same words, and the collectives stay in step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoshard import InputError, KeyedJaggedTensor, SparseFeatures, SparseFeaturesAllToAll
from tests.pool import Pool


def exchange_faulty(mesh: DeviceMesh, fault: str) -> None:
    """Rank 1 makes the mistake, or, with the arguments of the constructor, all do."""
    faulty = mesh.get_local_rank() == 1
    per_rank, stagger = [2, 1], 1
    names, values, lengths = ["a", "b", "c"], torch.arange(4), torch.tensor([1, 0, 2, 0, 1, 0])
    weights: Tensor | None = torch.ones(4)
    strides = None
    if fault == "world size":
        per_rank = [1, 1, 1]
    elif fault == "count":
        per_rank = [4, -1]
    elif fault == "stagger":
        stagger = 3
    elif faulty and fault == "other features":
        per_rank = [1, 2]
    elif faulty and fault == "keys":
        names = ["a", "b"]
    elif faulty and fault == "lengths":
        lengths = torch.tensor([1, 0, 2, 0, 1, 1])
    elif faulty and fault == "negative":
        lengths = torch.diff(torch.tensor([0, 1, 3, 2, 2, 3, 4]))
    elif faulty and fault == "no ids":
        values = torch.ones(4)
    elif faulty and fault == "ids dtype":
        values = values.int()
    elif faulty and fault == "no weights":
        weights = None
    elif faulty and fault == "weights dtype":
        weights = torch.ones(4, dtype=torch.complex64)
    elif faulty and fault == "stride":
        strides = [[2], [2], [2]]
    x = KeyedJaggedTensor(names, values, weights, lengths, stride_per_key_per_rank=strides)
    scores = None if faulty and fault == "none" else x
    exchange = SparseFeaturesAllToAll(mesh.get_group(), per_rank, per_rank, stagger=stagger)
    exchange(SparseFeatures(KeyedJaggedTensor.from_lists(["a", "b", "c"], [[[1], []]] * 3), scores)).wait()


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("world size", r"id_list_features_per_rank is \[1, 1, 1\]; expected .*2 ranks"),
        ("count", r"\[4, -1\]"),
        ("stagger", "stagger is 3; expected a divisor of 2"),
        ("other features", "the features per rank, or the stagger, of rank 1 are not those of rank 0"),
        ("keys", r"id_score_list_features, rank 1: 2 keys; expected 3, for \[2, 1\] features per rank"),
        ("lengths", "id_score_list_features, rank 1: the lengths add up to 5; expected 4, the number of values"),
        ("negative", "id_score_list_features, rank 1: 1 of the lengths are negative"),
        ("no ids", "id_score_list_features, rank 1: the values are no ids"),
        ("ids dtype", "dtype of the ids differs .*rank 0: torch.int64, rank 1: torch.int32"),
        ("no weights", "dtype of the weights differs .*rank 0: torch.float32, rank 1: None"),
        ("weights dtype", "id_score_list_features, rank 1: weights of a dtype that cannot travel"),
        ("stride", "kind of stride differs"),
        ("none", "id_score_list_features, rank 1: the list is None, while another rank has one"),
    ],
)
def test_errors(pool: Pool, fault: str, match: str) -> None:
    pool.expect_same_error(exchange_faulty, fault, error=InputError, match=match, world_size=2)
    # The collectives are still in step.
    pool.run(exchange_faulty, "nothing", world_size=2)
