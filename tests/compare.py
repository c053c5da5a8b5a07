"""A sharded model beside the original, on every rank of a pool: the generic rank function of the behavioural tests.

Every rank trains the sharded model on its own rows, and by itself the original on everybody's. What it compares is its
own: its rows of the output, every gradient, every parameter after each optimizer step.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils import _pytree as pytree

from autoshard import autoshard, parameters, sharding_plan
from autoshard.parameters import Shape, local_shapes
from tests.models import MODELS, Args, Model, relative

# Adam divides a gradient by its own size; the default eps of 1e-8 would blow up the rounding of entries near zero.
OPTIMIZERS: Mapping[str, Any] = {"sgd": torch.optim.SGD, "adam": functools.partial(torch.optim.Adam, eps=1e-4)}
ROUNDING = 1e-12


@dataclass(frozen=True)
class Setting:
    """One way to shard, run and train a model of `MODELS`.

    plan: what `autoshard` takes; "replicate" for a plan that replicates everything.
    by_rank: the original sees one rank's rows after the other, as under DDP, rather than all in one call; needed where
        rows of a batch meet (batch norm) or random numbers are drawn (dropout).
    capture_training, training: the mode at capture and afterwards.
    backend: of torch.compile; None is eager mode.
    ragged: as `autoshard` takes it.
    """

    model: str
    rows: int = 3
    plan: Any = "colwise"
    examples: bool = False
    replicated: bool = False
    reduction: str = "mean"
    optimizer: str = "sgd"
    steps: int = 2
    by_rank: bool = False
    capture_training: bool = True
    training: bool = True
    backend: str | None = None
    ragged: Any = False


@dataclass
class Result:
    """What one rank found: name -> relative difference, largest over the steps. 0.0 is bit equality."""

    outputs: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, float] = field(default_factory=dict)
    strategies: dict[str, str] = field(default_factory=dict)

    def wrong(self, limit: float = ROUNDING) -> dict[str, float]:
        """What differs by more than `limit`."""
        named = {"output": self.outputs} | {
            f"{kind} {name}": value
            for kind in ("gradients", "parameters", "buffers")
            for name, value in getattr(self, kind).items()
        }
        return {name: value for name, value in named.items() if not value <= limit}


def plan_of(spec: Any) -> Any:
    return {"*": "replicate"} if spec == "replicate" else spec


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def loss_of(output: Any, first_row: int, rows: int) -> Tensor:
    """The sum over `rows` rows, each element with a weight of its own, which depends on its row among all ranks'."""
    terms = []
    for leaf in tensors(output):
        if leaf.is_floating_point() and leaf.requires_grad:
            index = torch.arange(leaf.numel(), dtype=leaf.dtype) + first_row * (leaf.numel() // leaf.size(0))
            terms.append((leaf.flatten() * torch.cos(1 + index)).sum() / rows)
    return torch.stack(terms).sum()


def whole(tensor: Tensor | None, shape: Shape | None = None) -> Tensor | None:
    """The whole tensor, dense; `shape` is given for the part of a table whose gradients are sparse."""
    return None if tensor is None else parameters.whole(tensor, shape).clone()


def difference(expected: Tensor | None, got: Tensor | None) -> float:
    """No gradient is as good as one of zeros: a replicated parameter is reduced over the ranks even if it is unused."""
    if expected is None or got is None:
        present = got if expected is None else expected
        return 0.0 if present is None or not present.any() else float("inf")
    return relative(expected, got)


def train_both(mesh: DeviceMesh, setting: Setting) -> Result:
    """Runs on every rank."""
    return train_case(mesh, MODELS[setting.model], setting)


def train_case(mesh: DeviceMesh, case: Model, setting: Setting) -> Result:
    """`train_both` for a model that is not in the register."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _train_case(mesh, case, setting)


def _train_case(mesh: DeviceMesh, case: Model, setting: Setting) -> Result:
    world, rank = (1, 0) if setting.replicated else (mesh.size(), mesh.get_local_rank())
    original = case.make().train(setting.capture_training)
    model = copy.deepcopy(original)
    example = case.split(world, setting.rows, 0)[0][rank] if setting.examples else None
    sharded = autoshard(
        model,
        mesh,
        plan_of(setting.plan),
        example_inputs=example,
        input_placement=Replicate() if setting.replicated else Shard(0),
        gradient_reduction=setting.reduction,
        ragged=setting.ragged,
    )
    result = Result(strategies={row.parameter: row.strategy for row in sharding_plan(sharded).rows})
    for either in (original, sharded):
        either.train(setting.training)
    run = sharded if setting.backend is None else torch.compile(sharded, backend=setting.backend, fullgraph=True)
    optimizers = [
        OPTIMIZERS[setting.optimizer]([p for p in either.parameters() if p.requires_grad], lr=0.1)
        for either in (original, sharded)
    ]
    for step in range(setting.steps):
        parts, everything = case.split(world, setting.rows, step + 1)
        torch.manual_seed(100 * step + rank)
        output = run(*parts[rank])
        loss_of(output, rank * setting.rows, setting.rows).backward()
        expected = _original_step(original, setting, parts, everything, world, rank, step)
        _compare_outputs(expected, output, result)
        _compare(original, sharded, "gradients", result)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _compare(original, sharded, "parameters", result)
        _compare(original, sharded, "buffers", result)
    return result


def _original_step(
    original: nn.Module, setting: Setting, parts: list[Args], everything: Args, world: int, rank: int, step: int
) -> list[Tensor]:
    """The original's gradients, and this rank's rows of its output."""
    divisor = setting.rows * (world if setting.reduction == "mean" else 1)
    if not setting.by_rank:
        output = original(*everything)
        loss_of(output, 0, divisor).backward()
        return [leaf.chunk(world)[rank] if leaf.dim() else leaf for leaf in tensors(output)]
    outputs: list[Any] = []
    before = {name: buffer.clone() for name, buffer in original.named_buffers()}
    after: dict[str, Tensor] = {}
    for place, part in enumerate(parts):
        for name, buffer in original.named_buffers():
            buffer.copy_(before[name])  # every rank has buffers of its own
        torch.manual_seed(100 * step + place)
        outputs.append(original(*part))
        loss_of(outputs[-1], place * setting.rows, divisor).backward()
        if place == rank:
            after = {name: buffer.clone() for name, buffer in original.named_buffers()}
    for name, buffer in original.named_buffers():
        buffer.copy_(after[name])
    return tensors(outputs[rank])


def _compare_outputs(expected: list[Tensor], output: Any, result: Result) -> None:
    got = tensors(output)
    assert len(expected) == len(got)
    for a, b in zip(expected, got, strict=True):
        result.outputs = max(result.outputs, relative(a.detach(), b.detach()))


def _compare(original: nn.Module, sharded: nn.Module, kind: str, result: Result) -> None:
    named = "named_buffers" if kind == "buffers" else "named_parameters"
    wanted, found = dict(getattr(original, named)()), dict(getattr(sharded, named)())
    assert wanted.keys() <= found.keys()
    shapes = local_shapes(sharded)
    differences: dict[str, float] = getattr(result, kind)
    for name, want in wanted.items():
        got = found[name]
        pair = (want.grad, got.grad) if kind == "gradients" else (want, got)
        differences[name] = max(
            differences.get(name, 0.0), difference(whole(pair[0]), whole(pair[1], shapes.get(name)))
        )


def require_equal(results: list[Result], limit: float = ROUNDING) -> None:
    """Asserts that no rank found a difference above `limit`."""
    wrong = [result.wrong(limit) for result in results]
    assert not any(wrong), wrong
