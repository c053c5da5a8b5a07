"""One case of the matrix, as data, and the batches that belong to it."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

EMBEDDING = "embedding"
BAG = "embedding_bag"
LINEAR = "linear"


@dataclass(frozen=True)
class Case:
    """What one model computes on the ranks of one mesh. All sizes are those of one rank.

    Attributes:
        op: EMBEDDING, BAG or LINEAR.
        shape: of the ids, or of a linear's input.
        rows: V, or a linear's in features.
        columns: D, or a linear's out features.
        ranks: of the pool, in the order of the mesh.
        replicated: all ranks get one batch (input placement Replicate()), not each its own (Shard(0)).
        plan: "colwise", or "replicate" to shard nothing.
        gradients: "sum" or "mean" over the ranks.
        optimizer: "sgd", "adam", "sparse_adam" or "adagrad".
        dtype: of the weights, named as in torch.
        then: a second linear with that many out features follows, gelu between them; None for no second.
        bias: of a linear.
        mode: of a bag.
        bags: number of bags of 1-D ids; None for 2-D ids without offsets.
        tail: ids that come after the last offset; only with include_last_offset.
        weighted: with per_sample_weights that want a gradient.
        lowest_id: ids are drawn from there on.
        balanced: each id that occurs at all occurs equally often, on every rank.
        scale: of the weights at the start.
        zeros: some weights are exactly zero.
        offsets_dtype, ids_dtype: named as in torch.
        strided: inputs are views that are not contiguous.
        viewed: the model takes `.view(-1)` of the output.
        functional: the model calls `torch.nn.functional` with a parameter of its own.
        sizes: ragged: the first dimension of each rank's input, in place of that of `shape`.
        bag_counts: ragged: each rank's number of bags, in place of `bags`.
    """

    op: str
    shape: tuple[int, ...]
    rows: int
    columns: int
    ranks: tuple[int, ...] = (0, 1)
    replicated: bool = False
    plan: str = "colwise"
    gradients: str = "sum"
    optimizer: str = "sgd"
    dtype: str = "float32"
    then: int | None = None
    bias: bool = True
    mode: str = "sum"
    bags: int | None = None
    include_last_offset: bool = False
    tail: int = 0
    weighted: bool = False
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False
    lowest_id: int = 0
    balanced: bool = False
    scale: float = 1.0
    zeros: bool = False
    ids_dtype: str = "int64"
    offsets_dtype: str = "int64"
    strided: bool = False
    viewed: bool = False
    functional: bool = False
    sizes: tuple[int, ...] | None = None
    bag_counts: tuple[int, ...] | None = None

    def __str__(self) -> str:
        """The case as a call of `Case` that can be pasted."""
        named = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        return "Case(" + ", ".join(f"{name}={value!r}" for name, value, default in named if value != default) + ")"

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def ragged(self) -> bool:
        return self.sizes is not None or self.bag_counts is not None

    def on(self, *ranks: int) -> Case:
        """The same on other ranks."""
        return replace(self, ranks=ranks)

    def but(self, **changes: Any) -> Case:
        """The same, except for `changes`."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Batch:
    """What one rank calls its model with, and the gradient that its output gets.

    Attributes:
        input: ids, or a linear's input.
        offsets: of a bag of 1-D ids.
        weights: per_sample_weights.
        gradient: of the output; has its shape.
    """

    input: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    gradient: Tensor

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        return self.input, self.offsets, self.weights


def batches(case: Case, step: int) -> list[Batch]:
    """The batches of all ranks; on every rank the same. Replicated ranks all get the first."""
    made = [_batch(case, step, place) for place in range(1 if case.replicated else case.world)]
    return made * (case.world if case.replicated else 1)


def generator(case: Case, *purpose: object) -> torch.Generator:
    """Random numbers that follow from the case (its ranks and placement aside) and the purpose."""
    text = f"{replace(case, ranks=(0,), replicated=False)} {purpose}"
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))


def initial_weights(case: Case) -> list[Tensor]:
    """The weight of a lookup; weight and bias (if any) of each linear."""
    draw = generator(case, "weights")
    if case.op == LINEAR:
        found = []
        sizes = [case.rows, case.columns] + ([case.then] if case.then is not None else [])
        for inputs, outputs in itertools.pairwise(sizes):
            found.append(torch.randn(outputs, inputs, generator=draw))
            if case.bias:
                found.append(torch.randn(outputs, generator=draw))
        return [weight.to(case.torch_dtype) for weight in found]
    # Rows that no id reaches need no random numbers, and in a table of 2^24 rows should need none.
    table = torch.zeros(case.rows, case.columns, dtype=case.torch_dtype)
    drawn = torch.randn(case.rows - case.lowest_id, case.columns, generator=draw) * case.scale
    if case.zeros:
        drawn[torch.rand(drawn.shape, generator=draw) < 0.15] = 0.0
    table[case.lowest_id :] = drawn
    return [table]


def _batch(case: Case, step: int, place: int) -> Batch:
    draw = generator(case, step, place)
    shape = case.shape if case.sizes is None else (case.sizes[place], *case.shape[1:])
    if case.op == LINEAR:
        x = torch.randn(shape, generator=draw).to(case.torch_dtype)
        out = case.columns if case.then is None else case.then
        gradient = torch.randn(*shape[:-1], out, generator=draw).to(case.torch_dtype)
        return Batch(_strided(x, case), None, None, _viewed(gradient, case))
    ids = _ids(case, step, shape, draw)
    offsets, outputs = None, shape
    if case.op == BAG:
        bags = case.bags if case.bag_counts is None else case.bag_counts[place]
        if bags is not None:
            offsets = _offsets(case, ids.numel(), bags, draw)
        outputs = (shape[0] if bags is None else bags,)
    weights = None
    if case.weighted:
        weights = _strided(torch.randn(shape, generator=draw).to(case.torch_dtype), case)
    gradient = torch.randn(*outputs, case.columns, generator=draw).to(case.torch_dtype)
    ids = ids.to(getattr(torch, case.ids_dtype))
    return Batch(_strided(ids, case), offsets, weights, _viewed(gradient, case))


def _ids(case: Case, step: int, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    if not case.balanced:
        return torch.randint(case.lowest_id, case.rows, shape, generator=draw)
    count = torch.Size(shape).numel()
    chosen = torch.randperm(case.rows, generator=generator(case, step, "chosen"))[: count // 2]
    return chosen.repeat(2)[torch.randperm(count, generator=draw)].view(shape)


def _offsets(case: Case, ids: int, bags: int, draw: torch.Generator) -> Tensor:
    """Ascending from 0; bags may be empty, the last ones too."""
    end = ids - case.tail
    starts = torch.randint(0, end + 1, (max(bags - 1, 0),), generator=draw).sort().values
    parts = [torch.zeros(min(bags, 1), dtype=torch.int64), starts]
    if case.include_last_offset:
        parts.append(torch.tensor([end]))
    return torch.cat(parts).to(getattr(torch, case.offsets_dtype))


def _strided(x: Tensor, case: Case) -> Tensor:
    """The same values; where the case says so, as every second element of a larger tensor."""
    if not case.strided:
        return x
    larger = x.new_zeros(*x.shape, 2)
    larger[..., 0] = x
    return larger[..., 0]


def _viewed(gradient: Tensor, case: Case) -> Tensor:
    return gradient.view(-1) if case.viewed else gradient
