"""Jagged features against TorchRec itself, where it is installed; the `bench` extra in pyproject.toml says how."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard import InputError, KeyedJaggedTensor, SparseFeatures, SparseFeaturesAllToAll
from tests.pool import Pool
from tests.test_jagged import record_of

torchrec = pytest.importorskip("torchrec")

CASES = 40


def random_tensor(
    draw: random.Random, names: list[str], batches: list[int], by_key: bool, weights: Any, lengths_dtype: torch.dtype
) -> KeyedJaggedTensor:
    """One of ours, its values all different."""
    lengths = [draw.choice((0, 0, 1, 2, 7)) for batch in batches for _ in range(batch)]
    values = torch.arange(sum(lengths)) + draw.randrange(10**6) * 1000
    return KeyedJaggedTensor(
        names,
        values,
        None if weights is None else torch.rand(len(values), dtype=weights),
        torch.tensor(lengths, dtype=lengths_dtype),
        stride_per_key_per_rank=[[batch] for batch in batches] if by_key else None,
        stride=None if by_key else batches[0],
    )


def differences(mesh: DeviceMesh, stagger: int) -> list[str]:
    """The exchange of random features by TorchRec, and by us as id lists and as score lists in turn."""
    from torchrec.distributed.dist_data import KJTAllToAll

    world, rank = mesh.size(), mesh.get_local_rank()
    wrong = []
    for case in range(CASES):
        # What all ranks must agree on, and then what is this rank's own.
        draw = random.Random(f"{world} {stagger} {case}")
        per_rank = [draw.randint(0, 3) for _ in range(world)]
        per_rank[draw.randrange(world)] += 1
        weights = draw.choice((None, torch.float32, torch.float64))
        lengths_dtype = draw.choice((torch.int32, torch.int64))
        by_key, equal = case % 4 == 3, case % 4 == 0
        batch = draw.randint(0, 4)
        own = random.Random(f"{world} {stagger} {case} {rank}")
        batch = batch if equal else own.randint(0, 4)
        names = [f"key{place}" for place in range(sum(per_rank))]
        batches = [own.randint(0, 4) if by_key else batch for _ in names]
        x = random_tensor(own, names, batches, by_key, weights, lengths_dtype)

        theirs = KJTAllToAll(mesh.get_group(), per_rank, stagger)(x.to_torchrec()).wait().wait()
        none = [0] * world
        if case % 2:
            exchange = SparseFeaturesAllToAll(mesh.get_group(), per_rank, none, stagger=stagger)
            ours = exchange(SparseFeatures(x, None)).wait().id_list_features
        else:
            exchange = SparseFeaturesAllToAll(mesh.get_group(), none, per_rank, stagger=stagger)
            ours = exchange(SparseFeatures(None, x)).wait().id_score_list_features
        assert ours is not None
        found, expected = record_of(ours), record_of(KeyedJaggedTensor.from_torchrec(theirs))
        if found != expected:
            wrong.append(f"case {case}: {found}, not {expected}")
        dtypes = [(y.values().dtype, y.lengths().dtype, weights and y.weights().dtype) for y in (ours, theirs)]
        if dtypes[0] != dtypes[1]:
            wrong.append(f"case {case}: dtypes {dtypes}")
    return wrong


@pytest.mark.parametrize(("world", "stagger"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (4, 4)])
def test_exchange(pool: Pool, world: int, stagger: int) -> None:
    assert pool.run(differences, stagger, world_size=world, timeout=200) == [[]] * world


def test_conversion() -> None:
    for x in (
        KeyedJaggedTensor.from_lists(["A", "B"], [[[7, 8], [], [9]], [[3], [4], [5, 6, 7]]]),
        KeyedJaggedTensor.from_lists(["A"], [[[7, 8], []]], [[[0.5, 1.0], []]]),
        KeyedJaggedTensor.from_lists(["A", "B"], [[[7, 8], []], [[1]]]),
        KeyedJaggedTensor([], torch.arange(0), None, torch.arange(0), stride=4),
    ):
        there = x.to_torchrec()
        assert isinstance(there, torchrec.KeyedJaggedTensor)
        back = KeyedJaggedTensor.from_torchrec(there)
        assert record_of(back) == record_of(x)
        assert back.values() is x.values()
        for key in x.keys():
            assert there[key].values().tolist() == x[key].values().tolist()
            assert there[key].lengths().tolist() == x[key].lengths().tolist()


def test_inverse_indices_are_refused() -> None:
    there = torchrec.KeyedJaggedTensor(
        ["A"],
        torch.arange(2),
        lengths=torch.tensor([1, 1]),
        stride_per_key_per_rank=[[2]],
        inverse_indices=(["A"], torch.tensor([[0, 1, 1]])),
    )
    with pytest.raises(InputError, match="inverse indices"):
        KeyedJaggedTensor.from_torchrec(there)
