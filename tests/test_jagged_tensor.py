"""KeyedJaggedTensor by itself."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from autoshard import InputError, KeyedJaggedTensor, SparseFeatures

IDS = [[[7, 8], [], [9]], [[3], [4], [5, 6, 7]]]
WEIGHTS = [[[0.5, 1.0], [], [0.25]], [[1.0], [2.0], [1.0, 1.0, 3.0]]]
BATCHES = [[[1], [2, 3]], [[4, 5, 6]], []]


def lists(x: KeyedJaggedTensor) -> list[list[list[int]]]:
    return [part[key].to_lists() for part in x.split([1] * len(x.keys())) for key in part.keys()]


def small(weights: bool = True) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lists(["A", "B"], IDS, WEIGHTS if weights else None)


def by_key() -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lists(["A", "B", "C"], BATCHES)


def test_parts() -> None:
    x = small()
    assert x.keys() == ["A", "B"]
    assert x.values().tolist() == [7, 8, 9, 3, 4, 5, 6, 7]
    assert x.lengths().tolist() == [2, 0, 1, 1, 1, 3]
    assert x.offsets().tolist() == [0, 2, 2, 3, 4, 5, 8]
    assert x.weights().tolist() == [0.5, 1.0, 0.25, 1.0, 2.0, 1.0, 1.0, 3.0]
    assert (x.stride(), x.stride_per_key(), x.stride_per_key_per_rank()) == (3, [3, 3], [])
    assert x.length_per_key() == [3, 5]
    assert not x.variable_stride_per_key()
    assert x.device() == torch.device("cpu")
    assert small(weights=False).weights_or_none() is None


def test_ways_to_make_one() -> None:
    x = small()
    parts = (x.keys(), x.values())
    for other in (
        KeyedJaggedTensor(*parts, x.weights(), x.lengths()),
        KeyedJaggedTensor(*parts, x.weights(), x.lengths().view(2, 3)),
        KeyedJaggedTensor(*parts, x.weights(), offsets=x.offsets()),
        KeyedJaggedTensor.from_lengths(*parts, x.lengths(), x.weights()),
        KeyedJaggedTensor.from_offsets(*parts, x.offsets(), x.weights(), stride=3),
        x.to("cpu"),
        copy.deepcopy(x),
        pickle.loads(pickle.dumps(x)),
    ):
        assert repr(other) == repr(x)
        assert torch.equal(other.weights(), x.weights())


def test_offsets_keep_the_dtype() -> None:
    x = KeyedJaggedTensor(["A"], torch.arange(3), offsets=torch.tensor([0, 1, 3], dtype=torch.int32))
    assert x.lengths().dtype == x.offsets().dtype == torch.int32


def test_batch_for_each_key() -> None:
    x = by_key()
    assert x.stride_per_key() == [2, 1, 0]
    assert x.stride_per_key_per_rank() == [[2], [1], [0]]
    assert x.length_per_key() == [3, 3, 0]
    assert lists(x) == BATCHES
    assert lists(x.permute([1, 0])) == [BATCHES[1], BATCHES[0]]
    assert x.permute([1, 0]).stride_per_key_per_rank() == [[1], [2]]
    assert x.split([1, 2])[1].stride_per_key() == [1, 0]
    of_two_ranks = KeyedJaggedTensor(["A"], x.values(), None, x.lengths(), None, None, [[1, 2]])
    assert of_two_ranks.stride_per_key() == [3]
    with pytest.raises(InputError, match="Use stride_per_key"):
        x.stride()


def test_by_key() -> None:
    x = small()
    found = x.to_dict()
    assert {key: part.to_lists() for key, part in found.items()} == dict(zip("AB", IDS, strict=True))
    assert x["B"].offsets().tolist() == [0, 1, 2, 5]
    assert x["B"].weights().tolist() == [1.0, 2.0, 1.0, 1.0, 3.0]
    with pytest.raises(KeyError, match="C"):
        x["C"]


def test_split_permute_concat() -> None:
    x = small()
    first, none, second = x.split([1, 0, 1])
    assert (first.keys(), none.keys(), second.keys()) == (["A"], [], ["B"])
    assert none.stride() == 3
    assert none.values().numel() == 0
    assert repr(KeyedJaggedTensor.concat([first, second])) == repr(x)
    swapped = x.permute([1, 0])
    assert repr(swapped) == repr(KeyedJaggedTensor.concat([second, first]))
    assert torch.equal(swapped.permute([1, 0]).weights(), x.weights())
    assert lists(x.permute([1, 1, 0])) == [IDS[1], IDS[1], IDS[0]]
    assert x.permute([1, 1, 0]).keys() == ["B", "B", "A"]
    assert lists(x.permute([1])) == [IDS[1]]
    assert x.permute([]).stride() == 3


def test_gradients_pass() -> None:
    x = small()
    x.weights().requires_grad_()
    joined = KeyedJaggedTensor.concat(x.permute([1, 0]).split([1, 1]))
    (joined["A"].weights() * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.weights().grad is not None
    assert x.weights().grad.tolist() == [1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_no_keys_and_no_samples() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    none = KeyedJaggedTensor([], empty, None, empty, stride=4)
    assert (none.stride(), none.stride_per_key(), none.to_dict(), none.length_per_key()) == (4, [], {}, [])
    no_samples = KeyedJaggedTensor(["A", "B"], empty, None, empty)
    assert (no_samples.stride(), no_samples.length_per_key()) == (0, [0, 0])
    assert lists(no_samples) == [[], []]
    assert "batch 0" in repr(no_samples)


def test_a_key_twice() -> None:
    x = KeyedJaggedTensor.from_lists(["A", "A"], IDS)
    assert lists(x) == IDS
    with pytest.raises(InputError, match="'A' stands 2 times"):
        x["A"]
    with pytest.raises(InputError, match="'A' stands 2 times"):
        x.to_dict()


def test_pytree() -> None:
    sparse = SparseFeatures(None, small())
    leaves, spec = pytree.tree_flatten(sparse)
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 3
    again = pytree.tree_unflatten(leaves, spec)
    assert repr(again) == repr(sparse)
    doubled = pytree.tree_map(lambda x: x if x is None else x * 2, small()["A"])
    assert doubled.values().tolist() == [14, 16, 18]
    assert "object" in repr(pytree.tree_map(lambda _: object(), small()))
    assert repr(sparse.to("cpu")) == repr(sparse)


def test_repr() -> None:
    assert repr(small(weights=False)) == (
        "KeyedJaggedTensor(2 keys, batch 3, 8 values int64\n  A: [7 8] [] [9]\n  B: [3] [4] [5 6 7])"
    )
    assert repr(small()).endswith(
        "8 values int64, weights float32\n  A: [7:0.5 8:1] [] [9:0.25]\n  B: [3:1] [4:2] [5:1 6:1 7:3])"
    )
    assert "batches [2, 1, 0]" in repr(by_key())
    assert repr(small()["A"]) == "JaggedTensor(3 values int64, weights float32: [7:0.5 8:1] [] [9:0.25])"
    many = KeyedJaggedTensor.from_lists([f"k{i}" for i in range(20)], [[list(range(30))] * 12] * 20)
    assert repr(many).count("\n") == 17
    assert "[0 1 2 3 4 5 6 7 ...]" in repr(many)
    assert repr(many).endswith("... 4 more keys)")
    assert "... 4 more\n" in repr(many)
    assert repr(small().to("meta")) == "KeyedJaggedTensor(A, B: 8 values int64, weights float32)"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "both or none of lengths and offsets"),
        ({"lengths": torch.ones(4, dtype=torch.int64), "offsets": torch.arange(5)}, "both or none"),
        ({"keys": "AB", "lengths": torch.ones(4, dtype=torch.int64)}, "keys 'AB'"),
        ({"keys": [1, 2], "lengths": torch.ones(4, dtype=torch.int64)}, r"keys \[1, 2\]"),
        ({"lengths": torch.ones(4)}, "lengths or offsets of torch.float32"),
        ({"lengths": torch.ones(3, dtype=torch.int64)}, "3 lengths; expected a multiple of 2"),
        ({"lengths": torch.ones(4, dtype=torch.int64), "stride": 3}, "4 lengths; expected 2 keys times a stride of 3"),
        (
            {"lengths": torch.ones(4, dtype=torch.int64), "stride_per_key_per_rank": [[1], [2]]},
            r"4 lengths; expected 3, in 2 batches of \[1, 2\]",
        ),
        ({"lengths": torch.ones(4, dtype=torch.int64), "weights": torch.ones(3)}, r"weights of shape \(3,\)"),
        ({"lengths": torch.ones(4, dtype=torch.int64), "values": torch.ones(2, 2)}, r"values of shape \(2, 2\)"),
        ({"offsets": torch.arange(0)}, r"offsets of shape \(0,\)"),
    ],
)
def test_bad_parts(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        KeyedJaggedTensor(**{"keys": ["A", "B"], "values": torch.arange(4), **arguments})


def test_bad_use() -> None:
    x = small()
    for call, match in (
        (lambda: KeyedJaggedTensor.from_lists(["A"], IDS), "2 batches; expected 1"),
        (lambda: KeyedJaggedTensor.from_lists(["A", "B"], IDS, BATCHES), "weights in another form"),
        (lambda: small(weights=False).weights(), "no weights"),
        (lambda: x.split([1]), r"segments \[1\]"),
        (lambda: x.split([3, -1]), r"segments \[3, -1\]"),
        (lambda: x.permute([2]), "place 2; expected places from 0 to 1"),
        (lambda: KeyedJaggedTensor.concat([]), "no tensor"),
        (lambda: KeyedJaggedTensor.concat([x, small(weights=False)]), "weights in 1 of 2 tensors"),
        (lambda: KeyedJaggedTensor.concat([small(weights=False), by_key()]), "strides per key in 1 of 2 tensors"),
        (lambda: KeyedJaggedTensor.concat([x, x.split([1, 1])[0].permute([0, 0])]).split([1]), "segments"),
    ):
        with pytest.raises(InputError, match=match):
            call()
    shorter = KeyedJaggedTensor.from_lists(["C"], [[[1]]], [[[1.0]]])
    with pytest.raises(InputError, match=r"strides \[3, 1\]; expected one stride"):
        KeyedJaggedTensor.concat([x, shorter])
