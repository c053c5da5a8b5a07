"""dtypes, autocast, modes without gradient, accumulation, freezing, conversion, and gradients of gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard import autoshard
from autoshard.parameters import local_shapes
from tests.compare import difference, loss_of, whole
from tests.matrix.run import TOLERANCE
from tests.models import dense, ids, in_equal_parts, relative
from tests.pool import Pool

ROWS = 4


class Mixed(nn.Module):
    """ids (B, 3), weights (B, 3), x (B, 5) -> (B, 6): every kind of site, and layers that stay whole."""

    def __init__(self, sparse: bool = False, max_norm: float | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 7, padding_idx=2, sparse=sparse, max_norm=max_norm)
        self.bag = nn.EmbeddingBag(17, 7, mode="sum")
        self.layer = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 6)

    def forward(self, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        hidden = self.table(ids).sum(1) + self.bag(ids, per_sample_weights=weights) + self.layer(x)
        return self.head(torch.tanh(self.norm(hidden)))


class Autocast(Mixed):
    """Its first layer computes in bfloat16, the rest as it is called."""

    def forward(self, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            low = self.layer(x)
        hidden = self.table(ids).sum(1) + self.bag(ids, per_sample_weights=weights) + low.to(x.dtype)
        return self.head(torch.tanh(self.norm(hidden)))


_split = in_equal_parts(lambda rows, seed: (ids(rows, seed, 17, 3), dense(rows, seed, 3), dense(rows, seed + 1, 5)))
BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "mixed": Mixed,
    "autocast": Autocast,
    "sparse": lambda: Mixed(sparse=True),
    "max_norm": lambda: Mixed(max_norm=1.0),
}
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@dataclass(frozen=True)
class Way:
    """How a model of `BUILDERS` is made, sharded and run.

    dtype: at capture; `later` is what the model is converted to after that, None for no conversion.
    context: of each forward.
    backwards: batches whose gradients are accumulated before each step.
    frozen: parameters that need no gradient; from before the sharding, or (`freeze_later`) from after it.
    """

    model: str = "mixed"
    dtype: torch.dtype = torch.float64
    later: torch.dtype | None = None
    context: str = ""
    examples: bool = False
    backend: str | None = None
    backwards: int = 1
    frozen: tuple[str, ...] = ()
    freeze_later: bool = False
    steps: int = 2

    @property
    def final(self) -> torch.dtype:
        return self.later or self.dtype


def batches(world: int, seed: int, dtype: torch.dtype) -> tuple[list[tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Each rank's arguments and those of one process, the numbers of this dtype."""

    def cast(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(arg.to(dtype) if arg.is_floating_point() else arg for arg in args)

    parts, everything = _split(world, ROWS, seed)
    return [cast(part) for part in parts], cast(everything)


def make(way: Way, mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """The original and the sharded model."""
    world, rank = mesh.size(), mesh.get_local_rank()
    torch.manual_seed(7)
    original = BUILDERS[way.model]().to(way.dtype)
    sharded = copy.deepcopy(original)
    example = batches(world, 0, way.dtype)[0][rank] if way.examples else None
    if not way.freeze_later:
        freeze(sharded, way.frozen)
    sharded = autoshard(sharded, mesh, "colwise", example_inputs=example)
    freeze(original, way.frozen)
    freeze(sharded, way.frozen)
    return (original, sharded) if way.later is None else (original.to(way.later), sharded.to(way.later))


def freeze(model: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        model.get_parameter(name).requires_grad_(False)


def difference_of(original: nn.Module, sharded: nn.Module, gradients: bool) -> float:
    shapes, found = local_shapes(sharded), []
    for (name, want), (_, got) in zip(original.named_parameters(), sharded.named_parameters(), strict=True):
        pair = (want.grad, got.grad) if gradients else (want, got)
        dense_want = pair[0].to_dense() if pair[0] is not None and pair[0].is_sparse else pair[0]
        found.append(difference(whole(dense_want), whole(pair[1], shapes.get(name))))
    return max(found)


def train(mesh: DeviceMesh, way: Way) -> float:
    """The largest relative difference of outputs, gradients and parameters; infinite where a dtype differs."""
    world, rank = mesh.size(), mesh.get_local_rank()
    original, sharded = make(way, mesh)
    run = sharded if way.backend is None else torch.compile(sharded, backend=way.backend, fullgraph=True)
    both = (original, sharded)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.125) for m in both]
    found = []
    for step in range(way.steps):
        for part in range(way.backwards):
            parts, everything = batches(world, 10 * step + part + 1, way.final)
            with CONTEXTS[way.context]():
                expected, got = original(*everything), run(*parts[rank])
            found.append(relative(expected.detach().chunk(world)[rank], got.detach()))
            loss_of(expected, 0, ROWS * world).backward()
            loss_of(got, rank * ROWS, ROWS).backward()
        found.append(difference_of(original, sharded, gradients=True))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.append(difference_of(original, sharded, gradients=False))
    return max(found)


def require_same(pool: Pool, way: Way, limit: float | None = None, world_size: int = 3) -> None:
    compiled = way.backend is not None
    found = pool.run(train, way, world_size=world_size, fresh_dynamo=compiled, timeout=120)
    assert max(found) <= (TOLERANCE[str(way.final).removeprefix("torch.")] if limit is None else limit)


# ---------------------------------------------------------------- dtypes

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_a_model_of_another_dtype_trains_as_in_one_process(pool: Pool, dtype: torch.dtype) -> None:
    require_same(pool, Way(dtype=dtype))


@pytest.mark.parametrize(
    ("later", "examples"),
    [
        (torch.float16, False),
        (torch.bfloat16, False),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.slow),
    ],
)
def test_a_sharded_model_may_be_converted(pool: Pool, later: torch.dtype, examples: bool) -> None:
    require_same(pool, Way(dtype=torch.float32, later=later, examples=examples, steps=1 if examples else 2))


@pytest.mark.parametrize("model", ["sparse", "max_norm"])
def test_sharded_tables_may_be_converted(pool: Pool, model: str) -> None:
    require_same(pool, Way(model, dtype=torch.float32, later=torch.float64))


def parameters_of(mesh: DeviceMesh, later: torch.dtype) -> list[tuple[str, bool, torch.dtype, bool]]:
    """Name, is it a DTensor, its dtype, is it a leaf: after a conversion between two steps of training."""
    _, sharded = make(Way(dtype=torch.float32), mesh)
    parts, _ = batches(mesh.size(), 1, torch.float32)
    sharded(*parts[mesh.get_local_rank()]).sum().backward()
    sharded.zero_grad()
    sharded.to(later)
    return [(name, isinstance(p, DTensor), p.dtype, p.is_leaf) for name, p in sharded.named_parameters()]


def test_converted_parameters_stay_shards(pool: Pool) -> None:
    for found in pool.run(parameters_of, torch.float16, world_size=2):
        assert len(found) == 8
        assert [name for name, *facts in found if facts != [True, torch.float16, True]] == []


# ---------------------------------------------------------------- autocast

# bfloat16 rounds every hidden value, and a sum over other columns rounds to a neighbour now and then.
AUTOCAST = 3e-2


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_autocast_around_a_sharded_model_computes_the_same(pool: Pool, backend: str | None) -> None:
    require_same(pool, Way(dtype=torch.float32, context="autocast", backend=backend), AUTOCAST)


@pytest.mark.parametrize("examples", [False, True], ids=["traced", "exported"])
def test_autocast_in_a_part_of_a_model_computes_the_same(pool: Pool, examples: bool) -> None:
    require_same(pool, Way("autocast", dtype=torch.float32, examples=examples), AUTOCAST)


def linear_in_autocast(mesh: DeviceMesh) -> tuple[torch.dtype, torch.dtype, bool]:
    """The dtypes of a linear's and of a lookup's output under autocast, and if the linear's is that of torch."""
    world, rank = mesh.size(), mesh.get_local_rank()
    torch.manual_seed(0)
    layer, table = nn.Linear(5, 7), nn.Embedding(9, 7)
    x = torch.randn(ROWS * world, 5)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = layer(x).chunk(world)[rank]
        out = autoshard(layer, mesh, "colwise")(x.chunk(world)[rank])
        looked_up = autoshard(table, mesh, "colwise")(torch.arange(4))
    return out.dtype, looked_up.dtype, relative(expected, out) <= 2**-7


def test_autocast_changes_a_linear_and_no_lookup(pool: Pool) -> None:
    assert pool.run(linear_in_autocast, world_size=2) == [(torch.bfloat16, torch.float32, True)] * 2


# ---------------------------------------------------------------- without gradient


def evaluate(mesh: DeviceMesh, context: str, model: str, backend: str | None) -> tuple[float, bool, bool]:
    """Two forwards in a mode without gradient, and a step of training after them.

    Returns the largest difference, and if an output required a gradient, or was an inference tensor.
    """
    world, rank = mesh.size(), mesh.get_local_rank()
    original, sharded = make(Way(model), mesh)
    run = sharded if backend is None else torch.compile(sharded, backend=backend, fullgraph=True)
    found, requires_grad, inference = [], False, False
    for seed in (1, 2):
        parts, everything = batches(world, seed, torch.float64)
        with CONTEXTS[context]():
            expected, got = original(*everything), run(*parts[rank])
            requires_grad |= got.requires_grad
            inference |= got.is_inference()
            found.append(relative(expected.chunk(world)[rank], got))
    parts, everything = batches(world, 3, torch.float64)
    loss_of(original(*everything), 0, ROWS * world).backward()
    loss_of(run(*parts[rank]), rank * ROWS, ROWS).backward()
    found += [difference_of(original, sharded, gradients) for gradients in (True, False)]
    return max(found), requires_grad, inference


@pytest.mark.parametrize(
    ("context", "model", "backend"),
    [
        *((context, model, None) for context in ("no_grad", "inference_mode") for model in ("mixed", "max_norm")),
        pytest.param("no_grad", "mixed", "aot_eager", marks=pytest.mark.slow),
        pytest.param("inference_mode", "max_norm", "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_a_mode_without_gradient_computes_the_same(pool: Pool, context: str, model: str, backend: str | None) -> None:
    compiled = backend is not None
    for largest, requires_grad, inference in pool.run(
        evaluate, context, model, backend, world_size=2, fresh_dynamo=compiled, timeout=120
    ):
        assert largest <= 1e-12
        assert not requires_grad
        assert inference == (context == "inference_mode")


# ---------------------------------------------------------------- accumulated and frozen


@pytest.mark.parametrize("model", ["mixed", "sparse", "max_norm"])
def test_gradients_of_two_batches_add_up(pool: Pool, model: str) -> None:
    require_same(pool, Way(model, backwards=2))


@pytest.mark.parametrize("freeze_later", [False, True])
@pytest.mark.parametrize(
    "frozen",
    [("table.weight", "layer.weight", "norm.bias"), ("layer.bias", "head.weight"), ("bag.weight", "layer.weight")],
)
def test_frozen_weights_stay_and_the_others_train(pool: Pool, frozen: tuple[str, ...], freeze_later: bool) -> None:
    require_same(pool, Way(frozen=frozen, freeze_later=freeze_later))


def thaw(mesh: DeviceMesh) -> tuple[list[bool], float]:
    """Which parameters get a gradient while two are frozen; the difference of gradients after they are thawed."""
    world, rank = mesh.size(), mesh.get_local_rank()
    frozen = ("table.weight", "head.weight")
    original, sharded = make(Way(frozen=frozen), mesh)
    parts, everything = batches(world, 1, torch.float64)
    sharded(*parts[rank]).sum().backward()
    with_gradient = [p.grad is not None for _, p in sharded.named_parameters()]
    for model in (original, sharded):
        model.requires_grad_(True)
        model.zero_grad()
    loss_of(original(*everything), 0, ROWS * world).backward()
    loss_of(sharded(*parts[rank]), rank * ROWS, ROWS).backward()
    return with_gradient, difference_of(original, sharded, gradients=True)


def test_a_weight_that_was_frozen_may_be_trained_later(pool: Pool) -> None:
    names = [name for name, _ in Mixed().named_parameters()]
    for with_gradient, largest in pool.run(thaw, world_size=2):
        assert [name for name, has in zip(names, with_gradient, strict=True) if not has] == [
            "table.weight",
            "head.weight",
        ]
        assert largest <= 1e-12


class Pretrained(nn.Module):
    """Tables and bags made by `from_pretrained`, frozen or not."""

    def __init__(self, freeze: bool) -> None:
        super().__init__()
        vectors = torch.linspace(-1, 1, 17 * 7, dtype=torch.float64).view(17, 7)
        self.table = nn.Embedding.from_pretrained(vectors.clone(), freeze=freeze, padding_idx=3)
        self.bag = nn.EmbeddingBag.from_pretrained(vectors.sin(), freeze=freeze, mode="mean")

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([self.table(ids).sum(1), self.bag(ids)], 1)


def pretrained(mesh: DeviceMesh, freeze: bool) -> tuple[bool, bool, bool]:
    """Are the outputs equal, does an output require a gradient, are the gradients equal?"""
    world, rank = mesh.size(), mesh.get_local_rank()
    original, sharded = Pretrained(freeze), autoshard(Pretrained(freeze), mesh, "colwise", gradient_reduction="sum")
    everything = ids(ROWS * world, 1, 17, 3)
    expected, got = original(everything), sharded(everything.chunk(world)[rank])
    equal = torch.equal(expected.chunk(world)[rank], got)
    if not got.requires_grad:
        return equal, expected.requires_grad or got.requires_grad, all(p.grad is None for p in sharded.parameters())
    expected.sum().backward()
    got.sum().backward()
    return equal, True, difference_of(original, sharded, gradients=True) == 0.0


@pytest.mark.parametrize("freeze", [True, False])
def test_pretrained_tables_are_frozen_as_they_were(pool: Pool, freeze: bool) -> None:
    assert pool.run(pretrained, freeze, world_size=3) == [(True, not freeze, True)] * 3


# ---------------------------------------------------------------- gradients of gradients


class Squares(nn.Module):
    """ids (B, 3), x (B, 5) -> (B,): curved, so that gradients have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 7)
        self.layer = nn.Linear(5, 7)
        self.last = nn.Linear(7, 6)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.last(torch.tanh(self.layer(x)) * self.table(ids).sin().sum(1))).pow(2).sum(-1)


def penalised(model: nn.Module, ids: Tensor, x: Tensor, of: str) -> Tensor:
    """The sum of the output, and of the squares of its gradient by the input, or by a weight."""
    x = x.detach().requires_grad_()
    out = model(ids, x)
    wanted = x if of == "input" else model.get_parameter(of)
    (gradient,) = torch.autograd.grad(out.sum(), wanted, create_graph=True)
    squares = gradient.pow(2).sum()
    return out.sum() + (squares.full_tensor() if isinstance(squares, DTensor) else squares)


def twice(mesh: DeviceMesh, of: str, ragged: bool, examples: bool) -> float:
    world, rank = mesh.size(), mesh.get_local_rank()
    torch.manual_seed(7)
    original = Squares().double()
    everything = ids(ROWS * world, 1, 17, 3), dense(ROWS * world, 2, 5)
    part = tuple(tensor.chunk(world)[rank] for tensor in everything)
    sharded = autoshard(
        copy.deepcopy(original),
        mesh,
        "colwise",
        gradient_reduction="sum",
        ragged=ragged,
        example_inputs=part if examples else None,
    )
    penalised(original, *everything, of).backward()
    penalised(sharded, *part, of).backward()
    return difference_of(original, sharded, gradients=True)


@pytest.mark.parametrize(
    ("of", "ragged", "examples"),
    [
        *(
            (of, ragged, False)
            for of in ("input", "table.weight", "layer.weight", "last.bias")
            for ragged in (False, True)
        ),
        ("input", False, True),
    ],
)
def test_a_gradient_penalty_has_its_gradient(pool: Pool, of: str, ragged: bool, examples: bool) -> None:
    assert max(pool.run(twice, of, ragged, examples, world_size=3, timeout=120)) <= 1e-12


def twice_through_a_bag(mesh: DeviceMesh) -> None:
    model = autoshard(nn.EmbeddingBag(17, 7, mode="sum"), mesh, "colwise")
    weights = torch.ones(2, 3, requires_grad=True)
    out = model(ids(2, 1, 17, 3), per_sample_weights=weights)
    (gradient,) = torch.autograd.grad(out.pow(2).sum(), weights, create_graph=True)
    gradient.sum().backward()


def test_a_bag_has_no_second_gradient_in_torch_either(pool: Pool) -> None:
    weights = torch.ones(2, 3, requires_grad=True)
    table = torch.ones(17, 7, requires_grad=True)
    out = F.embedding_bag(ids(2, 1, 17, 3), table, per_sample_weights=weights, mode="sum")
    (gradient,) = torch.autograd.grad(out.pow(2).sum(), weights, create_graph=True)
    match = "is not implemented|not differentiable"
    with pytest.raises(RuntimeError, match=match):
        gradient.sum().backward()
    pool.expect_same_error(twice_through_a_bag, error=RuntimeError, match=match, world_size=2)
