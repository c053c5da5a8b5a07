"""Models with TorchRec's collections of tables, where it is installed; the `bench` extra in pyproject.toml says how.

Every rank trains the sharded model on its own features, and by itself the original on everybody's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard import autoshard, sharding_plan
from tests.models import relative
from tests.pool import Pool

pytest.importorskip("torchrec")

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType
from torchrec.models.dlrm import DLRM
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

ROWS = 20
KEYS = ["unused", "f1", "f2", "f3"]
LIMIT = 1e-5  # the tables of TorchRec are of float32


def bag_tables() -> list[EmbeddingBagConfig]:
    """One table for two features, two tables for one feature, a width below the number of ranks."""
    return [
        EmbeddingBagConfig(ROWS, 5, "t1", feature_names=["f1", "f3"], pooling=PoolingType.SUM),
        EmbeddingBagConfig(ROWS, 8, "t2", feature_names=["f2"], pooling=PoolingType.SUM),
        EmbeddingBagConfig(ROWS, 1, "t3", feature_names=["f2"], pooling=PoolingType.SUM),
    ]


class Pooled(nn.Module):
    """Bags, and a dense layer on them; gives the KeyedTensor too."""

    def __init__(self, weighted: bool = False, pooling: PoolingType = PoolingType.SUM) -> None:
        super().__init__()
        tables = bag_tables()
        for table in tables:
            table.pooling = pooling
        self.sparse = EmbeddingBagCollection(tables, is_weighted=weighted)
        self.head = nn.Linear(self.sparse_width(tables) + 5, 3)

    @staticmethod
    def sparse_width(tables: list[EmbeddingBagConfig]) -> int:
        return sum(table.embedding_dim * len(table.feature_names) for table in tables)

    def forward(self, features: KeyedJaggedTensor) -> tuple[KeyedTensor, Tensor]:
        pooled = self.sparse(features)
        return pooled, self.head(torch.cat([pooled.values(), pooled["f1"]], dim=1))


class Branching(Pooled):
    """One that no trace goes through: it asks its input what it is."""

    def forward(self, features: KeyedJaggedTensor) -> tuple[KeyedTensor, Tensor]:
        assert isinstance(features, KeyedJaggedTensor)
        return super().forward(features)


class Sequences(nn.Module):
    """Lookups without pooling."""

    def __init__(self, need_indices: bool) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(ROWS, 6, "t1", feature_names=["f1", "f3"]),
            EmbeddingConfig(ROWS, 6, "t2", feature_names=["f1"]),
        ]
        self.sparse = EmbeddingCollection(tables, need_indices=need_indices)
        self.head = nn.Linear(6, 3)

    def forward(self, features: KeyedJaggedTensor) -> tuple[dict[str, JaggedTensor], Tensor]:
        found = self.sparse(features)
        return found, self.head(found["f3"].values())


class Dense(nn.Module):
    """TorchRec's own DLRM, with the dense features made of the lengths of a sparse one."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(ROWS, 8, f"t{key}", feature_names=[key]) for key in ("f1", "f2")]
        self.dlrm = DLRM(
            EmbeddingBagCollection(tables), 1, dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[8, 1]
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        dense = features["f3"].lengths().float().unsqueeze(1)
        logits: Tensor = self.dlrm(dense, features)
        return logits


def make(model: str) -> nn.Module:
    torch.manual_seed(0)
    made = {
        "pooled": lambda: Pooled(),
        "weighted": lambda: Pooled(weighted=True),
        "mean": lambda: Pooled(pooling=PoolingType.MEAN),
        "branching": lambda: Branching(),
        "bags alone": lambda: EmbeddingBagCollection(bag_tables()),
        "sequences": lambda: Sequences(need_indices=False),
        "sequences with ids": lambda: Sequences(need_indices=True),
        "dlrm": lambda: Dense(),
    }[model]()
    return made


@dataclass
class Batch:
    """All ranks' features: of each rank lengths (F, B), the values of each key, and a weight for each id."""

    lengths: list[Tensor]
    values: list[list[Tensor]]
    weights: list[Tensor]

    @classmethod
    def draw(cls, sizes: list[int], seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        lengths = [torch.randint(0, 4, (len(KEYS), size), generator=generator) for size in sizes]
        values = [[torch.randint(0, ROWS, (int(n.sum()),), generator=generator) for n in of] for of in lengths]
        weights = [torch.rand(int(of.sum()), generator=generator).requires_grad_() for of in lengths]
        return cls(lengths, values, weights)

    def of_rank(self, rank: int, weighted: bool) -> KeyedJaggedTensor:
        weights = self.weights[rank] if weighted else None
        return KeyedJaggedTensor(KEYS, torch.cat(self.values[rank]), weights, self.lengths[rank].flatten())

    def of_all(self, weighted: bool) -> KeyedJaggedTensor:
        values = [torch.cat(of_key) for of_key in zip(*self.values, strict=True)]
        by_key = [w.split([len(v) for v in of]) for w, of in zip(self.weights, self.values, strict=True)]
        weights = torch.cat([torch.cat(of_key) for of_key in zip(*by_key, strict=True)]) if weighted else None
        return KeyedJaggedTensor(KEYS, torch.cat(values), weights, torch.cat(self.lengths, dim=1).flatten())

    def samples(self, rank: int) -> slice:
        """Where a rank's samples are among those of all."""
        start = sum(of.size(1) for of in self.lengths[:rank])
        return slice(start, start + self.lengths[rank].size(1))


def flat(output: Any) -> list[Tensor]:
    """All floating point results of a model."""
    if isinstance(output, KeyedTensor):
        return [output.values()]
    if isinstance(output, dict):
        return [jagged.values() for jagged in output.values()]
    return [output] if isinstance(output, Tensor) else [tensor for part in output for tensor in flat(part)]


def own_part(expected: Any, samples: slice, lengths: Tensor | None = None) -> Any:
    """A rank's part of a result for all; `lengths` are those of the ids whose rows a tensor holds, None for samples."""
    if isinstance(expected, KeyedTensor):
        return KeyedTensor(expected.keys(), expected.length_per_key(), expected.values()[samples])
    if isinstance(expected, Tensor):
        if lengths is None:
            return expected[samples]
        ends = [0, *lengths.cumsum(0).tolist()]
        return expected[ends[samples.start] : ends[samples.stop]]
    if isinstance(expected, JaggedTensor):
        lengths, weights = expected.lengths(), expected.weights_or_none()
        weights = None if weights is None else own_part(weights, samples, lengths)
        return JaggedTensor(own_part(expected.values(), samples, lengths), lengths=lengths[samples], weights=weights)
    if isinstance(expected, dict):
        return {name: own_part(jagged, samples) for name, jagged in expected.items()}
    first, second = expected
    lengths = first["f3"].lengths() if isinstance(first, dict) else None
    return own_part(first, samples), own_part(second, samples, lengths)


def unlike(expected: Any, got: Any, where: str, limit: float = LIMIT) -> list[str]:
    """What differs between two results, types and names included."""
    if type(expected) is not type(got):
        return [f"{where}: a {type(got)}, not a {type(expected)}"]
    if isinstance(expected, tuple):
        return [text for a, b in zip(expected, got, strict=True) for text in unlike(a, b, where, limit)]
    if isinstance(expected, dict):
        if list(expected) != list(got):
            return [f"{where}: {list(got)}, not {list(expected)}"]
        return [text for name in expected for text in unlike(expected[name], got[name], f"{where} {name}", limit)]
    if isinstance(expected, KeyedTensor):
        keys = [(x.keys(), x.length_per_key()) for x in (expected, got)]
        differs = [f"{where}: {keys[1]}, not {keys[0]}"] if keys[0] != keys[1] else []
        return differs + unlike(expected.values(), got.values(), where, limit)
    if isinstance(expected, JaggedTensor):
        parts = [(x.values(), x.lengths(), x.weights_or_none()) for x in (expected, got)]
        return unlike(*parts, where, limit)
    if expected is None:
        return []
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return [f"{where}: {got.dtype} {tuple(got.shape)}, not {expected.dtype} {tuple(expected.shape)}"]
    worst = relative(expected, got) if expected.numel() else 0.0
    return [f"{where}: off by {worst}"] if not worst <= limit else []


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


@dataclass
class Result:
    """What one rank found: differences; the graphs that were compiled, after each step; strategies of the plan."""

    wrong: list[str] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    strategies: set[str] = field(default_factory=set)


def sizes_of(kind: str, world: int, step: int) -> list[int]:
    """Samples of each rank."""
    equal = [4 + 4 * step] * world
    return {
        "equal": equal,
        "unequal": [3 + 3 * rank + 4 * step for rank in range(world)],
        "an empty rank": [0, *equal[1:]],
    }[kind]


def train(mesh: DeviceMesh, model: str, sizes: str, backend: str | None, replicated: bool = False) -> Result:
    """Two steps, four if compiled, of both models."""
    rank, world = mesh.get_local_rank(), mesh.size()
    original = make(model)
    weighted = model == "weighted"
    placement = Replicate() if replicated else Shard(0)
    sharded = autoshard(copy.deepcopy(original), mesh, input_placement=placement, ragged=not replicated)
    counter = CompileCounterWithBackend(backend) if backend else None
    run = torch.compile(sharded, backend=counter, fullgraph=True) if counter else sharded
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (original, sharded)]
    result = Result(strategies={row.strategy for row in sharding_plan(sharded).rows})
    for step in range(4 if counter else 2):
        batch = Batch.draw(sizes_of(sizes, world, step), step)
        expected = original(batch.of_all(weighted))
        part = expected if replicated else own_part(expected, batch.samples(rank))
        loss = sum(x.sin().sum() for x in flat(expected))
        (loss / (1 if replicated else world)).backward()
        weight_gradient, batch.weights[rank].grad = batch.weights[rank].grad, None
        output = run(batch.of_all(weighted) if replicated else batch.of_rank(rank, weighted))
        sum(x.sin().sum() for x in flat(output)).backward()

        result.wrong += unlike(part, output, f"step {step}, output")
        if step == 0 and isinstance(output, tuple):  # before any parameter differs by rounding
            result.wrong += unlike(part[0], output[0], "lookups, bit for bit", limit=0.0)
        if weighted:
            # Each rank has the gradient of its own loss, as under DDP: only parameters get the mean.
            scale = 1 if replicated else world
            result.wrong += unlike(weight_gradient * scale, batch.weights[rank].grad, f"step {step}, weights")
        for place, optimizer in enumerate(optimizers):
            grads = dict(sharded.named_parameters())
            if place == 0:
                for name, parameter in original.named_parameters():
                    where = f"step {step}, gradient of {name}"
                    result.wrong += unlike(whole(parameter.grad), whole(grads[name].grad), where)
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in original.named_parameters():
            where = f"step {step}, {name}"
            result.wrong += unlike(whole(parameter), whole(dict(sharded.named_parameters())[name]), where)
        if counter:
            result.graphs.append(counter.frame_count)
    return result


MODELS = ["pooled", "weighted", "mean", "branching", "bags alone", "sequences", "sequences with ids", "dlrm"]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_trains_as_the_original_does(pool: Pool, model: str, world: int) -> None:
    for result in pool.run(train, model, "unequal", None, world_size=world, timeout=200):
        assert result.wrong == []
        assert result.strategies == {"colwise"}


def test_a_rank_may_have_no_samples(pool: Pool) -> None:
    for model in ("pooled", "weighted", "sequences"):
        for result in pool.run(train, model, "an empty rank", None, world_size=3, timeout=200):
            assert result.wrong == []


def test_replicated_features_need_no_ragged(pool: Pool) -> None:
    for model in ("pooled", "weighted", "sequences"):
        for result in pool.run(train, model, "equal", None, True, world_size=2, timeout=200):
            assert result.wrong == []


@pytest.mark.parametrize(
    ("model", "backend"),
    [
        ("weighted", "aot_eager"),
        ("sequences with ids", "aot_eager"),
        *(pytest.param(model, "inductor", marks=pytest.mark.slow) for model in ("weighted", "sequences", "dlrm")),
    ],
)
def test_compiles_to_one_graph_for_all_sizes(pool: Pool, model: str, backend: str) -> None:
    """The first batch compiles for its sizes, the second for any sizes, later ones not at all."""
    for result in pool.run(train, model, "unequal", backend, world_size=2, timeout=280, fresh_dynamo=True):
        assert result.wrong == []
        assert result.graphs == [1, 2, 2, 2]
