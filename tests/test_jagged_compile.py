"""Jagged features inside of torch.compile: one graph, and batches of other sizes compile nothing anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autoshard import KeyedJaggedTensor, SparseFeatures, SparseFeaturesAllToAll
from tests.pool import Pool

pytestmark = pytest.mark.slow  # Inductor on every case: minutes on two cores


def features(names: list[str], seed: int, batches: list[int], weights: torch.dtype | None) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (sum(batches),), generator=generator)
    # At least two ids and a sample without any, whatever is drawn: sizes of 0 and 1 are always compiled for themselves.
    lengths[0], lengths[-1] = 2, 0
    total = int(lengths.sum())
    weight = None
    if weights is not None:
        weight = torch.randn(total, generator=generator, dtype=torch.float64).to(weights).requires_grad_()
    strides = [[batch] for batch in batches] if len(set(batches)) > 1 else None
    values = torch.randint(0, 50, (total,), generator=generator)
    return KeyedJaggedTensor(names, values, weight, lengths, stride_per_key_per_rank=strides)


class Model(torch.nn.Module):
    """An exchange, and a bag lookup of what arrives; gives the pooled rows, and the features themselves."""

    def __init__(self, exchange: SparseFeaturesAllToAll) -> None:
        super().__init__()
        self.exchange = exchange
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(50, 4, generator=generator, dtype=torch.float64))

    def forward(self, sparse: SparseFeatures) -> tuple[Tensor, SparseFeatures]:
        out = self.exchange(sparse).wait()
        scores = out.id_score_list_features
        assert scores is not None
        pooled = F.embedding_bag(
            scores.values(),
            self.table,
            scores.offsets(),
            mode="sum",
            per_sample_weights=scores.weights().double(),
            include_last_offset=True,
        )
        return pooled.view(len(scores.keys()), -1, 4), out


def compile_exchange(
    mesh: DeviceMesh, backend: str, equal: bool, ids_weights: torch.dtype | None, scores_weights: torch.dtype
) -> tuple[list[str], list[int]]:
    """What differs from eager mode over four batches, and how many graphs there are after each."""
    rank = mesh.get_local_rank()
    model = Model(SparseFeaturesAllToAll(mesh.get_group(), [2, 1], [1, 2]))
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    wrong, graphs = [], []
    for step in range(4):
        batch = 5 if equal else 5 + 3 * step + 2 * rank
        found: list[list[Any]] = []
        for function in (compiled, model):
            sparse = SparseFeatures(
                features(["a", "b", "c"], 10 * step + rank, [batch] * 3, ids_weights),
                features(["d", "e", "f"], 100 + 10 * step + rank, [batch] * 3, scores_weights),
            )
            pooled, out = function(sparse)
            pooled.sin().sum().backward()
            scores = sparse.id_score_list_features
            assert scores is not None and scores.weights().grad is not None
            keys = [x.keys() for x in (out.id_list_features, out.id_score_list_features) if x is not None]
            strides = [x.stride() for x in (out.id_list_features, out.id_score_list_features) if x is not None]
            tensors = [pooled, scores.weights().grad, model.table.grad, *pytree.tree_leaves(out)]
            found.append([keys, strides, tensors])
            model.table.grad = None
        graphs.append(counter.frame_count)
        if found[0][:2] != found[1][:2]:
            wrong.append(f"step {step}: {found[0][:2]}, not {found[1][:2]}")
        for place, (a, b) in enumerate(zip(found[0][2], found[1][2], strict=True)):
            if (a is None) != (b is None) or (a is not None and not torch.allclose(a, b, rtol=1e-6)):
                wrong.append(f"step {step}: tensor {place} is {a}, not {b}")
    return wrong, graphs


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("equal", "ids_weights", "scores_weights"),
    [
        (True, None, torch.float32),
        (False, None, torch.float64),
        (False, torch.float32, torch.float32),
        (False, torch.float64, torch.float32),
    ],
)
def test_compile(pool: Pool, backend: str, equal: bool, ids_weights: Any, scores_weights: torch.dtype) -> None:
    """The first batch compiles for its sizes, the second for any sizes, later ones not at all."""
    found = pool.run(
        compile_exchange,
        backend,
        equal,
        ids_weights,
        scores_weights,
        world_size=2,
        timeout=300,
        fresh_dynamo=True,
    )
    for wrong, graphs in found:
        assert wrong == []
        assert graphs == [1, 2, 2, 2]


def compile_stride_per_key(mesh: DeviceMesh) -> list[bool]:
    rank = mesh.get_local_rank()
    exchange = SparseFeaturesAllToAll(mesh.get_group(), [2, 1], [0, 3])

    def call(sparse: SparseFeatures) -> SparseFeatures:
        return exchange(sparse).wait()

    sparse = SparseFeatures(
        features(["a", "b", "c"], rank, [2, 3 + rank, 4], None),
        features(["d", "e", "f"], 10 + rank, [4, 2, 3 + rank], torch.float32),
    )
    found, expected = torch.compile(call, backend="aot_eager", fullgraph=True)(sparse), call(sparse)
    equal = []
    for x, y in (
        (found.id_list_features, expected.id_list_features),
        (found.id_score_list_features, expected.id_score_list_features),
    ):
        assert x is not None and y is not None
        equal.append((x.keys(), x.stride_per_key_per_rank()) == (y.keys(), y.stride_per_key_per_rank()))
        for a, b in zip(pytree.tree_leaves(x), pytree.tree_leaves(y), strict=True):
            equal.append(a is b or torch.equal(a, b))
    return equal


def test_compile_stride_per_key(pool: Pool) -> None:
    for equal in pool.run(compile_stride_per_key, world_size=2, timeout=120, fresh_dynamo=True):
        assert all(equal)


def rearrange(x: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor, dict[str, Tensor]]:
    first, second = x.split([1, 2])
    joined = KeyedJaggedTensor.concat([second, first])
    by_key = {key: of_key.values().sum() + of_key.offsets()[-1] for key, of_key in joined.to_dict().items()}
    return x.permute([2, 0, 1]), joined, by_key


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_tensor(backend: str) -> None:
    """As input and as output, and with every way to take it apart in between."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(rearrange, backend=counter, fullgraph=True)
    for step in range(4):
        x = features(["a", "b", "c"], step, [3 + step] * 3, torch.float32)
        found, expected = compiled(x), rearrange(x)
        for place in (0, 1):
            assert found[place].keys() == expected[place].keys()
            assert found[place].stride() == 3 + step
        for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 2


def test_export() -> None:
    """A pytree node: torch.export takes it apart."""

    class Sum(torch.nn.Module):
        def forward(self, x: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Tensor]:
            return x, x.values().sum() + x.lengths().sum()

    x = features(["a", "b"], 0, [3, 3], torch.float32)
    out, total = torch.export.export(Sum(), (x,)).module()(x)
    assert isinstance(out, KeyedJaggedTensor)
    assert out.keys() == ["a", "b"]
    assert int(total) == int(x.values().sum() + x.lengths().sum())
