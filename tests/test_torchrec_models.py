"""Models with TorchRec's collections of tables, where it is installed; the `bench` extra in pyproject.toml says how.

Every rank trains the sharded model on its own features, and by itself the original on everybody's.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard import autoshard, graph_diff, sharding_plan, unshard
from passes.errors import CaptureError, InputError
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
    sharded = autoshard(copy.deepcopy(original), mesh, "colwise", input_placement=placement, ragged=not replicated)
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


def use_once(mesh: DeviceMesh, what: str) -> Any:
    """One way to shard or to call a model."""
    model: Any = make("bags alone" if what == "no key" else "pooled")
    if what == "equal sizes":
        return autoshard(model, mesh, "colwise")
    return autoshard(model, mesh, "colwise", ragged=True)(
        KeyedJaggedTensor(["f1"], torch.arange(0), lengths=torch.zeros(2).int())
    )


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        (
            "equal sizes",
            CaptureError,
            "sparse: a TorchRec EmbeddingBagCollection, .*; expected ragged=True, .* Call autoshard(..., ragged=True).",
        ),
        ("no key", InputError, r"no feature 'f3' among ['f1']; expected all features of the tables. Add the key."),
    ],
)
def test_errors(pool: Pool, what: str, error: type[Exception], text: str) -> None:
    pattern = ".*".join(map(re.escape, text.split(".*")))
    pool.expect_same_error(use_once, what, error=error, match=pattern, world_size=2, timeout=200)


def lack_weights(mesh: DeviceMesh) -> None:
    model = autoshard(make("weighted"), mesh, "colwise", ragged=True)
    model(Batch.draw([3] * mesh.size(), 0).of_rank(mesh.get_local_rank(), weighted=False))


def test_missing_weights_are_an_error(pool: Pool) -> None:
    match = "no weights; expected one for each id: the collection is weighted"
    pool.expect_same_error(lack_weights, error=InputError, match=match, world_size=2, timeout=200)


def train_deduplicated(mesh: DeviceMesh) -> list[str]:
    """Batches of their own for every feature, expanded by inverse indices."""
    rank, world = mesh.get_local_rank(), mesh.size()
    original = make("bags alone")
    sharded = autoshard(copy.deepcopy(original), mesh, "colwise", ragged=True)

    def features(of: int) -> KeyedJaggedTensor:
        generator = torch.Generator().manual_seed(of)
        strides = [2 + of, 3, 4 + of]
        lengths = torch.randint(0, 4, (sum(strides),), generator=generator)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        rows = torch.stack([torch.randint(0, stride, (6 + of,), generator=generator) for stride in strides])
        return KeyedJaggedTensor(
            KEYS[1:],
            values,
            lengths=lengths,
            stride_per_key_per_rank=[[stride] for stride in strides],
            inverse_indices=(KEYS[1:], rows),
        )

    expected = [original(features(of)) for of in range(world)]
    (sum(x.values().sin().sum() for x in expected) / world).backward()
    output = sharded(features(rank))
    output.values().sin().sum().backward()
    wrong = unlike(expected[rank], output, "output", limit=0.0)
    for name, parameter in sharded.named_parameters():
        wrong += unlike(original.get_parameter(name).grad, whole(parameter.grad), name)
    return wrong


def test_deduplicated_features_are_expanded(pool: Pool) -> None:
    assert pool.run(train_deduplicated, world_size=2, timeout=200) == [[]] * 2


def from_meta(mesh: DeviceMesh) -> list[list[float]]:
    def init(value: float) -> Any:
        return lambda weight: weight.fill_(value)

    tables = [EmbeddingBagConfig(ROWS, 5, f"t{i}", feature_names=[f"f{i}"], init_fn=init(i)) for i in (1, 2)]
    model = autoshard(EmbeddingBagCollection(tables, device=torch.device("meta")), mesh, "colwise", ragged=True)
    return [whole(p).unique().tolist() for p in model.parameters()]


def test_a_meta_collection_is_initialised_as_its_tables_ask(pool: Pool) -> None:
    assert pool.run(from_meta, world_size=2, timeout=200) == [[[1.0], [2.0]]] * 2


class Own(EmbeddingBagCollection):
    """A subclass that computes something else."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        out = super().forward(features)
        return KeyedTensor(out.keys(), out.length_per_key(), -out.values())


def look_inside(mesh: DeviceMesh) -> dict[str, Any]:
    """Whose code runs, what it is captured with, and whether it goes back."""
    batch = Batch.draw([3] * mesh.size(), 0)
    own = Own(bag_tables())
    negative = autoshard(copy.deepcopy(own), mesh, "colwise", ragged=True)(batch.of_rank(mesh.get_local_rank(), False))
    example = (batch.of_all(False),)
    original = make("pooled")
    sharded = autoshard(copy.deepcopy(original), mesh, "colwise", example_inputs=example, ragged=True)
    names = list(dict(sharded.named_parameters()))
    notes = sharding_plan(sharded).notes
    modules = sorted({edit.module for edit in graph_diff(sharded).edits})
    plain = unshard(sharded)
    return {
        "subclass": unlike(own_part(own(*example), batch.samples(mesh.get_local_rank())), negative, "subclass"),
        "names": names == list(dict(original.named_parameters())),
        "notes": notes,
        "modules": modules,
        "unsharded": unlike(original(*example), plain(*example), "unsharded", limit=0.0),
        "forward": type(plain.sparse).forward is EmbeddingBagCollection.forward,
    }


def test_what_is_captured(pool: Pool) -> None:
    for found in pool.run(look_inside, world_size=2, timeout=200):
        assert found["subclass"] == found["unsharded"] == []
        assert found["names"] and found["forward"]
        assert found["modules"] == ["head", *(f"sparse.embedding_bags.t{i}" for i in (1, 2, 3))]
        assert any(
            "sparse is a TorchRec EmbeddingBagCollection, whose features are ragged" in n for n in found["notes"]
        )


def test_torchrec_is_imported_by_nobody_else() -> None:
    code = """
import sys, torch, autoshard
from autoshard import verify
from autoshard.capture import capture
capture(torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3)))
assert not [name for name in sys.modules if name.partition(".")[0] in ("torchrec", "fbgemm_gpu")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
