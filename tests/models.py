"""Models that tests of capture, plan, rewrite and diff share, each with a maker of batches.

`MODELS[name]` is looked up by name on a rank, so that only names travel to the pool. All models are small, of float64,
the same on every call, and have widths that 2, 3 and 4 ranks cannot all divide.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

Args = tuple[Any, ...]
Splitter = Callable[[int, int, int], tuple[list[Args], Args]]


def load_example(name: str) -> ModuleType:
    """A program of examples/, which is no package."""
    path = Path(__file__).resolve().parent.parent / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dlrm = load_example("dlrm")

# ---------------------------------------------------------------- the four models of the issue


class TwoTower(nn.Module):
    """user (B,), item (B, 3) -> scores (B,): the history of items is averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(50, 10)
        self.items = nn.Embedding(40, 7, padding_idx=0)
        self.user_tower = nn.Sequential(nn.Linear(10, 9), nn.ReLU(), nn.Linear(9, 6))
        self.item_tower = nn.Sequential(nn.Linear(7, 6, bias=False), nn.Tanh())

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        left = self.user_tower(self.users(user))
        right = self.item_tower(self.items(item)).mean(1)
        return (F.normalize(left, dim=-1) * right).sum(-1)


class Block(nn.Module):
    """Attention and feed forward, both behind a layer norm: (B, L, width) -> (B, L, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """tokens (B, 5) -> logits (B, 5, 19)."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(19, 8)
        self.positions = nn.Parameter(torch.randn(5, 8) / 4)
        self.blocks = nn.ModuleList(Block(8, 2) for _ in range(blocks))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 19)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(13, 11), nn.ReLU(), nn.Linear(11, 6, bias=False), nn.Tanh(), nn.Linear(6, 1))


def build_even_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8))


def build_dlrm(tables: int = 5) -> nn.Module:
    return dlrm.DLRM(rows=30, dim=6, tables=tables)


# ---------------------------------------------------------------- single layers, for bit equality


class Lookup(nn.Module):
    """ids (B, 3) -> (B, 3, 7)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, 7, padding_idx=2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Bags(nn.Module):
    """ids (B, 3), weights (B, 3) -> sum, mean and max of bags, (B, 3, 7)."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.EmbeddingBag(23, 7, mode="sum")
        self.means = nn.EmbeddingBag(23, 7, mode="mean", padding_idx=1)
        self.maxima = nn.EmbeddingBag(23, 7, mode="max")

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        pooled = [self.sums(ids, per_sample_weights=weights), self.means(ids), self.maxima(ids)]
        return torch.stack(pooled, 1)


class OffsetBag(nn.Module):
    """ids (N,), offsets (B,) -> (B, 7)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(23, 7, mode="mean")

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.table(ids, offsets)


# ---------------------------------------------------------------- shapes of code


class Scale:
    """A forward hook that doubles what a module returns, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Args, output: Tensor) -> Tensor:
        self.calls += 1
        return output * 2


class Hooked(nn.Module):
    """Hooks on a layer, on a block and on the model itself: each changes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.block = nn.Sequential(nn.Linear(7, 6), nn.Tanh())
        self.scales = [Scale(), Scale(), Scale()]
        for module, scale in zip([self.first, self.block, self], self.scales, strict=True):
            module.register_forward_hook(scale)
        self.block.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x))


class Buffers(nn.Module):
    """A persistent buffer, one that is not saved, and one that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)
        self.register_buffer("shift", torch.arange(7.0))
        self.register_buffer("scale", torch.full((7,), 0.5), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.layer(x) * self.scale + self.shift


class DictModel(nn.Module):
    """{"dense": (B, 5), "ids": (B, 2)} -> {"score": (B, 3), "parts": [(B, 7), (B, 14)]}."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 7)
        self.table = nn.Embedding(11, 7)
        self.score = nn.Linear(21, 3)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        parts = [self.dense(batch["dense"]), self.table(batch["ids"]).flatten(1)]
        return {"score": self.score(torch.cat(parts, 1)), "parts": parts}


@dataclass
class Batch:
    dense: Tensor
    ids: Tensor


@dataclass
class Scores:
    score: Tensor
    dense: Tensor


class DataclassModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 7)
        self.table = nn.Embedding(11, 7)

    def forward(self, batch: Batch) -> Scores:
        dense = self.dense(batch.dense)
        return Scores(score=dense * self.table(batch.ids), dense=dense)


pytree.register_dataclass(Batch)
pytree.register_dataclass(Scores)


class SharedSubmodule(nn.Module):
    """One layer under two names, and a block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = self.first
        self.block = nn.Sequential(nn.Linear(5, 5), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.block(self.block(self.first(x))))


class TiedTables(nn.Module):
    """Two tables with one weight: both are sharded along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(11, 7)
        self.other = nn.EmbeddingBag(11, 7, mode="sum")
        self.other.weight = self.one.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.one(ids).sum(1) * self.other(ids)


class TiedHead(nn.Module):
    """A table and a linear with one weight (V, D): what is the table's feature axis is the linear's input axis."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.tokens(ids)))


class OptionalMask(nn.Module):
    """x (B, 5), mask (B, 7) or none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.layer(x)
        if mask is not None:
            hidden = hidden * mask
        return self.last(hidden)


class ModeBranch(nn.Module):
    """One layer in training, another in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.train_layer = nn.Linear(5, 7)
        self.eval_layer = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.train_layer(x) if self.training else self.eval_layer(x) * 2


class NonTensorArguments(nn.Module):
    """A number, a flag and a string decide what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)

    def forward(self, x: Tensor, factor: float, square: bool = False, activation: str = "tanh") -> Tensor:
        hidden = self.layer(x) * factor
        if square:
            hidden = hidden * hidden
        return getattr(torch, activation)(hidden)


class Factor(nn.Module):
    """A number that code without branches uses: nothing keeps it from being traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)

    def forward(self, x: Tensor, factor: float = 3.0) -> Tensor:
        return self.layer(x) * factor


class Attention(nn.Module):
    """nn.MultiheadAttention, whose forward reads the weight of its child out_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        return self.last(self.attention(hidden, hidden, hidden, need_weights=False)[0])


class Encoder(nn.Module):
    """nn.TransformerEncoderLayer, which takes a fused path in evaluation that reads all weights of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 11, batch_first=True, dropout=0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embed(x))


class Parameters(nn.Module):
    """Parameters without a layer: in a list, in a dict, and of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(5, 5) / 2 for _ in range(3))
        self.scales = nn.ParameterDict({"a": torch.randn(5), "b": torch.randn(5)})
        self.shift = nn.Parameter(torch.randn(5))
        self.layer = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return self.layer(x * self.scales["a"] + self.scales["b"] + self.shift)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -3 * gradient


class CustomGradient(nn.Module):
    """An autograd.Function whose gradient no trace of its forward would have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_Reverse.apply(self.layer(x)))


class AttributeWriter(nn.Module):
    """Leaves its last hidden value behind, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)
        self.last = nn.Linear(7, 3)
        self.calls = 0
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.hidden = self.layer(x)
        return self.last(self.hidden) * self.calls


class IteratedSequential(nn.Module):
    """Keeps what each layer of a Sequential returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        values = []
        for layer in self.layers:
            x = layer(x)
            values.append(x)
        return torch.cat(values, 1)


class ChildReader(nn.Module):
    """A weight that the parent's code reads, in one expression that can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.tokens(ids)) @ self.tokens.weight.T


class UntraceableChildReader(nn.Module):
    """The same behind a branch on a value, which keeps the model from being traced."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.layer(self.tokens(ids))
        if scale is not None:
            hidden = hidden * scale
        return hidden @ self.tokens.weight.T + self.layer.bias.sum()


class AliasedChildReader(nn.Module):
    """A weight that the parent's code reads through a local name, in a module that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        tokens = self.tokens
        hidden = self.layer(tokens(ids))
        if scale is not None:
            hidden = hidden * scale
        return hidden @ tokens.weight.T


class BatchNormed(nn.Module):
    """The layer in front has a bias with a gradient, as what stands between does not commute with a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(torch.tanh(self.layer(x)))))


class Dropped(nn.Module):
    """Dropout as a module and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.last(self.dropout(self.layer(x))), 0.25, self.training)


class Checkpointed(nn.Module):
    """A block whose activations are computed again in backward: a nested graph in torch.export."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 5)
        self.block = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6))

    def forward(self, ids: Tensor) -> Tensor:
        out = checkpoint(self.block, self.table(ids), use_reentrant=False)
        assert isinstance(out, Tensor)
        return out * 2


class NoGradRegion(nn.Module):
    """A table that is looked up without gradient beside one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Embedding(11, 7)
        self.trained = nn.Embedding(11, 7)
        self.layer = nn.Linear(7, 3)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = self.fixed(ids) * 2
        return self.layer(fixed + self.trained(ids))


class Frozen(nn.Module):
    """A table, a layer and a bare parameter that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Embedding.from_pretrained(torch.randn(11, 7))
        self.layer = nn.Linear(7, 7).requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(7), requires_grad=False)
        self.last = nn.Linear(7, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.layer(self.fixed(ids)) * self.scale)


class Indexed(nn.Module):
    """`weight[ids]` is no embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.layer = nn.Linear(7, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table.weight[ids])


class Functional(nn.Module):
    """Sites by F.* on parameters of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, 7))
        self.bag = nn.Parameter(torch.randn(11, 7))
        self.weight = nn.Parameter(torch.randn(3, 7))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(F.embedding(ids, self.table).sum(1) + F.embedding_bag(ids, self.bag), self.weight, self.bias)


class UncalledLayer(nn.Module):
    """A layer that no forward calls, and one that only another method calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)
        self.spare = nn.Linear(5, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def predict(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


# ---------------------------------------------------------------- batches


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(rows: int, seed: int, *shape: int) -> Tensor:
    return torch.randn(rows, *shape, generator=_random(seed), dtype=torch.float64)


def ids(rows: int, seed: int, high: int, *shape: int) -> Tensor:
    return torch.randint(high, (rows, *shape), generator=_random(seed))


def in_equal_parts(make: Callable[[int, int], Args]) -> Splitter:
    """Of a maker of (rows, seed): every rank's rows of one global batch, and that batch."""

    def split(ranks: int, rows: int, seed: int) -> tuple[list[Args], Args]:
        whole = make(ranks * rows, seed)

        def part(rank: int) -> Args:
            return pytree.tree_map(lambda leaf: leaf[rank * rows : (rank + 1) * rows], whole)

        return [part(rank) for rank in range(ranks)], whole

    return split


def with_constants(make: Callable[[int, int], Args], *constants: Any) -> Splitter:
    """The same, with arguments after the tensors that are no tensors."""
    split = in_equal_parts(make)

    def and_constants(ranks: int, rows: int, seed: int) -> tuple[list[Args], Args]:
        parts, whole = split(ranks, rows, seed)
        return [(*part, *constants) for part in parts], (*whole, *constants)

    return and_constants


def offset_bags(ranks: int, rows: int, seed: int) -> tuple[list[Args], Args]:
    """Bags of 0 to 4 ids: on every rank as many bags and as many ids, differently divided."""
    numbers = 2 * rows + 1
    parts: list[Args] = []
    for rank in range(ranks):
        starts = torch.randint(numbers + 1, (rows - 1,), generator=_random(100 * seed + rank)).sort().values
        parts.append((ids(numbers, 100 * seed + rank, 23), torch.cat([torch.zeros(1, dtype=torch.long), starts])))
    whole = (
        torch.cat([part[0] for part in parts]),
        torch.cat([part[1] + rank * numbers for rank, part in enumerate(parts)]),
    )
    return parts, whole


# ---------------------------------------------------------------- the register


@dataclass(frozen=True)
class Model:
    """A model and its batches.

    build: makes it; use `make`, which seeds.
    split: (ranks, rows per rank, seed) -> each rank's arguments, and the arguments of one process.
    mixes_rows: in training, a row of the result depends on other rows, or on random numbers.
    exports: torch.export takes it.
    whole: fx traces it as a whole, as one graph.
    replicated: parameters of layers that "colwise" cannot shard.
    modes: it computes something else in evaluation than in training.
    """

    build: Callable[[], nn.Module]
    split: Splitter
    mixes_rows: bool = False
    exports: bool = True
    whole: bool = True
    replicated: frozenset[str] = field(default_factory=frozenset)
    modes: bool = False

    def make(self) -> nn.Module:
        torch.manual_seed(7)
        return self.build().double()

    def one_batch(self, rows: int = 4, seed: int = 1) -> Args:
        return self.split(1, rows, seed)[1]


_x = in_equal_parts(lambda rows, seed: (dense(rows, seed, 5),))
_sequence = in_equal_parts(lambda rows, seed: (dense(rows, seed, 4, 5),))
_ids = in_equal_parts(lambda rows, seed: (ids(rows, seed, 11, 3),))


def _batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    return dense(rows, seed, 5), ids(rows, seed, 11)


MODELS: dict[str, Model] = {
    "mlp": Model(build_mlp, in_equal_parts(lambda rows, seed: (dense(rows, seed, 13),))),
    "even_mlp": Model(build_even_mlp, in_equal_parts(lambda rows, seed: (dense(rows, seed, 6),))),
    "two_tower": Model(
        TwoTower, in_equal_parts(lambda rows, seed: (ids(rows, seed, 50), ids(rows, seed + 1000, 40, 3)))
    ),
    "dlrm": Model(
        build_dlrm, in_equal_parts(lambda rows, seed: (dense(rows, seed, 13), ids(rows, seed + 1000, 30, 5)))
    ),
    "transformer": Model(Transformer, in_equal_parts(lambda rows, seed: (ids(rows, seed, 19, 5),))),
    "lookup": Model(Lookup, in_equal_parts(lambda rows, seed: (ids(rows, seed, 23, 3),))),
    "bags": Model(Bags, in_equal_parts(lambda rows, seed: (ids(rows, seed, 23, 3), dense(rows, seed, 3)))),
    "offset_bag": Model(OffsetBag, offset_bags),
    "hooked": Model(Hooked, _x, whole=False, exports=False),
    "buffers": Model(Buffers, _x),
    "dict": Model(
        DictModel,
        in_equal_parts(lambda rows, seed: ({"dense": dense(rows, seed, 5), "ids": ids(rows, seed, 11, 2)},)),
    ),
    "dataclass": Model(DataclassModel, in_equal_parts(lambda rows, seed: (Batch(*_batch(rows, seed)),))),
    "shared_submodule": Model(SharedSubmodule, _x),
    "tied_tables": Model(TiedTables, _ids),
    "tied_head": Model(TiedHead, _ids, replicated=frozenset({"head.bias"})),
    "optional_mask": Model(OptionalMask, _x, whole=False),
    "mode_branch": Model(ModeBranch, _x, whole=False, modes=True),
    "non_tensor_arguments": Model(
        NonTensorArguments,
        with_constants(lambda rows, seed: (dense(rows, seed, 5),), 1.5, True, "sigmoid"),
        whole=False,
    ),
    "factor": Model(Factor, with_constants(lambda rows, seed: (dense(rows, seed, 5),), 2.5)),
    "attention": Model(
        Attention,
        _sequence,
        whole=False,
        replicated=frozenset({"attention.out_proj.weight", "attention.out_proj.bias"}),
    ),
    "encoder": Model(
        Encoder,
        _sequence,
        whole=False,
        mixes_rows=True,
        modes=True,
        replicated=frozenset(
            f"layer.{name}.{key}" for name in ("self_attn.out_proj", "linear1", "linear2") for key in ("weight", "bias")
        ),
    ),
    "parameters": Model(Parameters, _x),
    "custom_gradient": Model(CustomGradient, _x, whole=False, exports=False),
    "attribute_writer": Model(AttributeWriter, _x, whole=False, exports=False),
    "iterated_sequential": Model(IteratedSequential, _x),
    "child_reader": Model(ChildReader, _ids, replicated=frozenset({"tokens.weight"})),
    "untraceable_child_reader": Model(
        UntraceableChildReader, _ids, whole=False, replicated=frozenset({"tokens.weight", "layer.weight", "layer.bias"})
    ),
    # By which name a child goes is not known, so that every child's weight might be the one that is read.
    "aliased_child_reader": Model(
        AliasedChildReader, _ids, whole=False, replicated=frozenset({"tokens.weight", "layer.weight", "layer.bias"})
    ),
    "batch_norm": Model(BatchNormed, _x, mixes_rows=True, modes=True),
    "dropout": Model(Dropped, _x, mixes_rows=True, whole=False, modes=True),
    "checkpoint": Model(Checkpointed, _ids, whole=False),
    "no_grad": Model(NoGradRegion, _ids, whole=False),
    "frozen": Model(Frozen, _ids),
    "indexed": Model(Indexed, _ids, replicated=frozenset({"table.weight"})),
    "functional": Model(Functional, _ids),
    "uncalled": Model(UncalledLayer, _x),
}

# For the tests that compile: a smaller model, and the DLRM of the example.
SIZED = {
    "one_block": Model(lambda: Transformer(1), MODELS["transformer"].split),
    "criteo": Model(
        lambda: build_dlrm(26),
        in_equal_parts(lambda rows, seed: (dense(rows, seed, 13), ids(rows, seed + 1000, 30, 26))),
    ),
}


def model_of(name: str) -> Model:
    return SIZED[name] if name in SIZED else MODELS[name]


CORE = ("mlp", "two_tower", "dlrm", "transformer")
ODD = tuple(name for name in MODELS if name not in CORE)


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> every embedding, embedding_bag and linear layer, a shared one by each of its paths."""
    kinds = (nn.Embedding, nn.EmbeddingBag, nn.Linear)
    return {path: m for path, m in model.named_modules(remove_duplicate=False) if isinstance(m, kinds)}


def relative(expected: Tensor, got: Tensor) -> float:
    """The largest difference, over the largest value of the expected tensor; infinite where shape or dtype differ."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return math.inf
    if torch.equal(expected, got):
        return 0.0
    difference = (expected.double() - got.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(1e-300))
