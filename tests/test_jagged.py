"""Jagged features: the tensor, and the exchange against recorded vectors, plain Python lists, and one process."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoshard import KeyedJaggedTensor, SparseFeatures, SparseFeaturesAllToAll
from passes.ops.jagged import exchange_jagged, exchange_lengths, recat, segment_index, segment_sums
from tests.counting import Call, counting_mesh
from tests.pool import Pool

GOLDEN_PATH = Path(__file__).resolve().parent.parent.parent / "shared" / "golden" / "torchrec_jagged_all_to_all.json"
GOLDEN: dict[str, Any] = (
    json.loads(GOLDEN_PATH.read_text()) if GOLDEN_PATH.exists() else {"get_recat": [], "kjt_all_to_all": []}
)

# For each key, for each sample, the ids.
Lists = list[list[list[int]]]


# ---------------------------------------------------------------- the recorded vectors


def test_golden_is_whole() -> None:
    if not GOLDEN_PATH.exists():
        pytest.skip("the recorded vectors are not here")
    assert len(GOLDEN["get_recat"]) == 23
    assert len(GOLDEN["kjt_all_to_all"]) == 12


@pytest.mark.parametrize("case", GOLDEN["get_recat"], ids=str)
def test_recat(case: dict[str, Any]) -> None:
    found = recat(case["local_split"], case["num_splits"], case["stagger"], case["batch_size_per_rank"])
    assert found == case["recat"]


def tensor_of(record: dict[str, Any]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        record["keys"],
        torch.tensor(record["values"], dtype=torch.int64),
        None if record["weights"] is None else torch.tensor(record["weights"], dtype=torch.float32),
        torch.tensor(record["lengths"], dtype=torch.int64),
        stride=record["stride"],
        stride_per_key_per_rank=record["stride_per_key_per_rank"],
    )


def record_of(x: KeyedJaggedTensor) -> dict[str, Any]:
    weights = x.weights_or_none()
    return {
        "keys": x.keys(),
        "lengths": x.lengths().tolist(),
        "values": x.values().tolist(),
        "weights": None if weights is None else weights.tolist(),
        "stride": None if x.variable_stride_per_key() else x.stride(),
        "stride_per_key": x.stride_per_key(),
        "stride_per_key_per_rank": x.stride_per_key_per_rank() if x.variable_stride_per_key() else None,
    }


def exchange_golden(mesh: DeviceMesh, case: dict[str, Any]) -> list[tuple[Any, Any]]:
    """As id lists, as score lists, and as both."""
    x = tensor_of(case["per_rank"][mesh.get_local_rank()]["input"])
    splits, none = case["splits"], [0] * mesh.size()
    found = []
    for ids, scores in ((x, None), (None, x), (x, x)):
        per_rank = [none if given is None else splits for given in (ids, scores)]
        exchange = SparseFeaturesAllToAll(mesh.get_group(), *per_rank, stagger=case["stagger"])
        out = exchange(SparseFeatures(ids, scores)).wait()
        both = (out.id_list_features, out.id_score_list_features)
        found.append(tuple(None if y is None else record_of(y) for y in both))
    return found


@pytest.mark.parametrize("case", GOLDEN["kjt_all_to_all"], ids=lambda case: case["case"])
def test_golden_exchange(pool: Pool, case: dict[str, Any]) -> None:
    found = pool.run(exchange_golden, case, world_size=case["world"])
    for rank, by_rank in enumerate(found):
        expected = case["per_rank"][rank]["output"]
        assert by_rank == [(expected, None), (None, expected), (expected, expected)]


def exchange_by_functions(mesh: DeviceMesh, case: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The functions of `passes.ops.jagged`, one by one, for batches of one size."""
    x = tensor_of(case["per_rank"][mesh.get_local_rank()]["input"])
    splits, group = case["splits"], mesh.get_group().group_name
    owned = splits[mesh.get_local_rank()]
    lengths = exchange_lengths(x.lengths(), splits, group)
    send = [int(part.sum()) for part in x.lengths().split([count * x.stride() for count in splits])]
    receive = lengths.view(mesh.size(), -1).sum(1).tolist()
    values = exchange_jagged(x.values(), receive, send, sum(receive), group)
    order = recat(owned, mesh.size(), case["stagger"])
    if order is None:
        return lengths.tolist(), values.tolist()
    by_key = lengths.view(owned * mesh.size(), x.stride())
    sizes = by_key.sum(1)
    index = segment_index((sizes.cumsum(0) - sizes)[order], sizes[order], sum(receive))
    return by_key[order].flatten().tolist(), values[index].tolist()


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in GOLDEN["kjt_all_to_all"]
        if len({str(r["input"]["stride_per_key"]) for r in case["per_rank"]}) == 1
    ],
    ids=lambda case: case["case"],
)
def test_golden_functions(pool: Pool, case: dict[str, Any]) -> None:
    found = pool.run(exchange_by_functions, case, world_size=case["world"])
    outputs = [rank["output"] for rank in case["per_rank"]]
    assert found == [(output["lengths"], output["values"]) for output in outputs]


def test_segments() -> None:
    sizes = torch.tensor([2, 0, 3, 1])
    assert segment_sums(torch.tensor([1, 2, 3, 4, 5, 6]), sizes).tolist() == [3, 0, 12, 6]
    starts = sizes.cumsum(0) - sizes
    order = torch.tensor([2, 3, 0, 1])
    assert segment_index(starts[order], sizes[order], 6).tolist() == [2, 3, 4, 5, 0, 1]


# ---------------------------------------------------------------- the example of the documentation


def named(x: KeyedJaggedTensor, key: str, names: Sequence[str]) -> str:
    return " ".join(f"[{' '.join(names[place] for place in sample)}]" for sample in x[key].to_lists())


def exchange_documented(mesh: DeviceMesh) -> tuple[dict[str, str], dict[str, str]]:
    """Ids stand for the names of the picture."""
    of_rank: list[dict[str, list[list[str]]]] = [
        {
            "A": [["A.V0"], [], ["A.V1", "A.V2"]],
            "B": [[], ["B.V0"], ["B.V1"]],
            "C": [["C.V0"], ["C.V1"], []],
            "D": [[], [], ["D.V0"]],
        },
        {
            "A": [["A.V3"], ["A.V4"], []],
            "B": [[], ["B.V2"], ["B.V3", "B.V4"]],
            "C": [["C.V2"], ["C.V3"], []],
            "D": [["D.V1"], [], []],
        },
    ]
    names = sorted({name for lists in of_rank for batch in lists.values() for sample in batch for name in sample})
    mine = of_rank[mesh.get_local_rank()]
    lists = [[[names.index(name) for name in sample] for sample in batch] for batch in mine.values()]
    weights = [[[place / 4 for place in sample] for sample in batch] for batch in lists]
    exchange = SparseFeaturesAllToAll(
        mesh.get_group(), id_list_features_per_rank=[2, 1], id_score_list_features_per_rank=[1, 3]
    )
    features = SparseFeatures(
        KeyedJaggedTensor.from_lists(["A", "B", "C"], lists[:3]),
        KeyedJaggedTensor.from_lists(["A", "B", "C", "D"], lists, weights),
    )
    out = exchange(features).wait()
    ids, scores = out.id_list_features, out.id_score_list_features
    assert ids is not None and scores is not None
    assert torch.equal(scores.weights(), scores.values() / 4)
    return {key: named(ids, key, names) for key in ids.keys()}, {
        key: named(scores, key, names) for key in scores.keys()
    }


def test_documented_example(pool: Pool) -> None:
    (ids0, scores0), (ids1, scores1) = pool.run(exchange_documented, world_size=2)
    a = "[A.V0] [] [A.V1 A.V2] [A.V3] [A.V4] []"
    b = "[] [B.V0] [B.V1] [] [B.V2] [B.V3 B.V4]"
    c = "[C.V0] [C.V1] [] [C.V2] [C.V3] []"
    d = "[] [] [D.V0] [D.V1] [] []"
    assert ids0 == {"A": a, "B": b}
    assert ids1 == {"C": c}
    assert scores0 == {"A": a}
    assert scores1 == {"B": b, "C": c, "D": d}


# ---------------------------------------------------------------- random features


def random_lists(seed: int, rank: int, num_keys: int, batches: Sequence[int], longest: int = 4) -> Lists:
    """Every id is another: it says where it comes from."""
    draw = random.Random(f"{seed} {rank}")
    lists, serial = [], 100_000 * (rank + 1)
    for key in range(num_keys):
        batch = []
        for _ in range(batches[key]):
            length = draw.randint(0, longest)
            batch.append(list(range(serial, serial + length)))
            serial += length
        lists.append(batch)
    return lists


def weight_of(ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Exact in every dtype."""
    return (ids % 8).to(dtype) / 8 if dtype.is_floating_point else (ids % 8).to(dtype)


def make(names: Sequence[str], lists: Lists, weights: torch.dtype | None = None) -> KeyedJaggedTensor:
    x = KeyedJaggedTensor.from_lists(names, lists)
    if weights is None:
        return x
    return KeyedJaggedTensor.from_lengths(
        names,
        x.values(),
        x.lengths(),
        weight_of(x.values(), weights).requires_grad_(weights.is_floating_point),
        stride_per_key_per_rank=x.stride_per_key_per_rank() or None,
    )


def exchange_random(
    mesh: DeviceMesh, seed: int, stagger: int, by_key: bool, dtypes: Sequence[torch.dtype | None]
) -> list[str]:
    """Both lists at once, beside what plain lists say; returns what is wrong."""
    draw = random.Random(seed)
    world, rank = mesh.size(), mesh.get_local_rank()
    wrong, given, expected, per_ranks = [], [], [], []
    order = [first + world // stagger * part for first in range(world // stagger) for part in range(stagger)]
    for which, dtype in enumerate(dtypes):
        per_rank = [draw.randint(0, 3) for _ in range(world)]
        num_keys = sum(per_rank)
        of_rank = []
        for source in range(world):
            batch = draw.randint(0, 4)
            batches = [draw.randint(0, 4) if by_key else batch for _ in range(num_keys)]
            of_rank.append(random_lists(seed + which, source, num_keys, batches))
        names = [f"key{place}" for place in range(num_keys)]
        x = make(names, of_rank[rank], dtype)
        if by_key:
            strides = [[len(batch)] for batch in of_rank[rank]]
            x = KeyedJaggedTensor(names, x.values(), x.weights_or_none(), x.lengths(), None, None, strides)
        given.append(x)
        first = sum(per_rank[:rank])
        owned = range(first, first + per_rank[rank])
        expected.append({names[key]: [s for source in order for s in of_rank[source][key]] for key in owned})
        per_ranks.append(per_rank)
    exchange = SparseFeaturesAllToAll(mesh.get_group(), *per_ranks, stagger=stagger)
    out = exchange(SparseFeatures(*given)).wait()
    found = (out.id_list_features, out.id_score_list_features)
    for x, lists, dtype, sent in zip(found, expected, dtypes, given, strict=True):
        if x is None or {key: of_key.to_lists() for key, of_key in x.to_dict().items()} != lists:
            wrong.append(f"{x}, not {lists}")
        elif x.stride_per_key() != [len(batch) for batch in lists.values()]:
            wrong.append(f"strides {x.stride_per_key()}")
        elif dtype is not None:
            if not torch.equal(x.weights(), weight_of(x.values(), dtype)) or x.weights().dtype != dtype:
                wrong.append(f"weights {x.weights()}")
            if dtype.is_floating_point:
                # The gradient of a weight is a function of its id: so it must find its way back.
                (x.weights() * (x.values() % 16)).sum().backward()
                if not torch.equal(sent.weights().grad, (sent.values() % 16).to(dtype)):
                    wrong.append(f"gradient {sent.weights().grad}")
    return wrong


@pytest.mark.parametrize(
    "dtypes", [(None, torch.float32), (torch.float64, torch.float64), (torch.int64, torch.bfloat16)]
)
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(("world", "stagger"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (4, 4)])
def test_random(
    pool: Pool, world: int, stagger: int, by_key: bool, dtypes: tuple[torch.dtype | None, torch.dtype]
) -> None:
    for seed in range(5):
        found = pool.run(exchange_random, seed, stagger, by_key, dtypes, world_size=world)
        assert found == [[]] * world


@pytest.mark.parametrize("ranks", [(2, 0), (3, 1, 2)])
def test_any_group(pool: Pool, ranks: tuple[int, ...]) -> None:
    """Ranks count by their place in the group."""
    found = pool.run(exchange_random, 7, 1, False, (None, torch.float32), ranks=ranks)
    assert found == [[]] * len(ranks)


def exchange_dtypes(mesh: DeviceMesh) -> list[Any]:
    """Ids and lengths of other dtypes than int64, and no ids at all."""
    found = []
    for ids, lengths in ((torch.int32, torch.int64), (torch.int32, torch.int32), (torch.int16, torch.int32)):
        for others in (torch.int32, torch.int64):
            x = KeyedJaggedTensor(["a", "b"], torch.arange(3).to(ids), None, torch.tensor([1, 2], dtype=lengths))
            y = KeyedJaggedTensor(["c", "d"], torch.arange(0).to(others), torch.ones(0), torch.tensor([0, 0]))
            out = SparseFeaturesAllToAll(mesh.get_group(), [1, 1], [1, 1])(SparseFeatures(x, y)).wait()
            a, b = out.id_list_features, out.id_score_list_features
            assert a is not None and b is not None
            assert a.values().tolist() == ([0, 0] if mesh.get_local_rank() == 0 else [1, 2, 1, 2])
            found.append((a.values().dtype, a.lengths().dtype) == (ids, lengths))
            found.append((b.values().dtype, b.values().numel(), b.stride()) == (others, 0, 2))
    return found


def test_dtypes(pool: Pool) -> None:
    for found in pool.run(exchange_dtypes, world_size=2):
        assert all(found)


def exchange_nothing(mesh: DeviceMesh) -> tuple[Any, Any]:
    out = SparseFeaturesAllToAll(mesh.get_group(), [2, 1], [1, 1], device="cpu")(SparseFeatures(None, None)).wait()
    return out.id_list_features, out.id_score_list_features


def test_both_lists_may_be_none(pool: Pool) -> None:
    assert pool.run(exchange_nothing, world_size=2) == [(None, None)] * 2


def differentiate_twice(mesh: DeviceMesh) -> tuple[Tensor, Tensor, Tensor]:
    x = make(["a", "b"], random_lists(0, mesh.get_local_rank(), 2, [3, 3]), torch.float64)
    exchange = SparseFeaturesAllToAll(mesh.get_group(), [0, 0], [1, 1])
    awaitable = exchange(SparseFeatures(None, x))
    out = awaitable.wait().id_score_list_features
    again = awaitable.wait().id_score_list_features
    assert out is not None and again is not None
    assert torch.equal(out.weights(), again.weights())
    loss = (out.weights() ** 3 * (out.values() % 16)).sum()
    (first,) = torch.autograd.grad(loss, x.weights(), create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x.weights())
    factor, weights = x.values() % 16, x.weights().detach()
    return first.detach() - 3 * weights**2 * factor, second - 6 * weights * factor, weights


def test_gradient_of_weights_twice(pool: Pool) -> None:
    for first, second, weights in pool.run(differentiate_twice, world_size=2):
        assert weights.numel() > 0
        assert not first.any()
        assert not second.any()


# ---------------------------------------------------------------- what is sent


def count(mesh: DeviceMesh, ids: Any, scores: Any, by_key: bool) -> tuple[list[Call], list[Call], float]:
    """The calls of a forward and of a backward, and the bytes of lengths and ids that are for the other rank."""
    counted, counter = counting_mesh(mesh)
    rank = mesh.get_local_rank()
    features = []
    for which, dtype in enumerate((ids, scores)):
        batches = [3, 2, 4] if by_key else [3, 3, 3]
        features.append(make(["a", "b", "c"], random_lists(which, rank, 3, batches), dtype))
    exchange = SparseFeaturesAllToAll(counted.get_group(), [2, 1], [1, 2])
    with counter.counting() as forward:
        out = exchange(SparseFeatures(*features)).wait()
    both = [x for x in (out.id_list_features, out.id_score_list_features) if x is not None]
    weights = [x.weights() for x in both if x.weights_or_none() is not None]
    with counter.counting() as backward:
        if weights:
            sum((w.double().sum() for w in weights), torch.zeros((), dtype=torch.float64)).backward()
    leaving = 0
    for x, per_rank in zip(features, ([2, 1], [1, 2]), strict=True):
        other = x.split(per_rank)[1 - rank]
        leaving += other.values().numel() + other.lengths().numel()
        leaving += len(other.keys()) if by_key else 0
    return forward, backward, leaving * 8


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(
    ("ids", "scores", "weights"),
    [
        (None, None, 0),
        (None, torch.float32, 1),
        (torch.float32, torch.float32, 1),
        (torch.float32, torch.float64, 2),
    ],
)
def test_collectives(pool: Pool, ids: Any, scores: Any, weights: int, by_key: bool) -> None:
    """Sizes; lengths and ids of both lists; weights of both lists. Backward the weights alone."""
    for forward, backward, leaving in pool.run(count, ids, scores, by_key, world_size=2):
        assert [call.kind for call in forward] == ["all_to_all"] * (2 + weights)
        assert [call.kind for call in backward] == ["all_to_all"] * weights
        assert forward[0].bytes_sent <= 160
        assert forward[1].bytes_sent == leaving
        assert {call.dtype for call in forward[2:]} == {dtype for dtype in (ids, scores) if dtype is not None}
