"""verify(): original and sharded model side by side, in fresh processes.

The original is what one process computes: for each rank's batch its loss, the gradient of the mean (or sum) of these
losses, an optimizer step. For a model that does not mix rows of the batch that is the model on the concatenated batch;
for one that does (batch norm) it is what DDP computes. Random numbers (dropout) are drawn from one seed per rank and
step on both sides.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Shard
from torch.utils import _pytree as pytree

from autoshard.api import ExchangeDtype, autoshard, sharding_plan
from autoshard.launch import launch
from autoshard.parameters import local_shapes, whole, whole_gradient
from autoshard.planner import PlanSpec
from passes.errors import EquivalenceError, describe
from passes.layout import narrower
from passes.ops.redistribute import MEAN, SUM
from passes.plan import ShardingPlan

_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# A gradient that cancels out (a bias before batch norm, a key's bias before softmax) is nothing but rounding noise,
# so a tensor counts as at least this part of the largest value among all tensors of its kind.
_SMALLEST_SCALE = 2.0**-8
_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The largest difference in one tensor.

    Attributes:
        what: "output", "gradient" or "parameter".
        name: of the tensor.
        step: in which it was compared, from 0.
        difference: largest absolute difference over the largest absolute value of the original; of a gradient or
            parameter at least 1/256 of the largest among all of them.
    """

    what: str
    name: str
    step: int
    difference: float


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What `verify` compared, and found equal within `tolerance`.

    Attributes:
        comparisons: one per tensor and step.
        tolerance: largest relative difference that counts as rounding.
        world_size: number of ranks.
        compiled: True if the sharded model ran under torch.compile.
        graphs: graphs that torch.compile made on rank 0; 0 if not compiled.
        graph_breaks: breaks between them.
        plan: what the model was sharded by.
    """

    comparisons: tuple[Comparison, ...]
    tolerance: float
    world_size: int
    compiled: bool
    graphs: int
    graph_breaks: int
    plan: ShardingPlan

    def __str__(self) -> str:
        rows = []
        for what in ("output", "gradient", "parameter"):
            group = [c for c in self.comparisons if c.what == what]
            if group:
                worst = max(group, key=lambda c: c.difference)
                rows.append([what, len(group), f"{worst.difference:.1e}", f"{worst.name} (step {worst.step})"])
        table = tabulate(rows, headers=["compared", "tensors", "largest difference", "in"], disable_numparse=True)
        mode = f"compiled, {self.graphs} graphs, {self.graph_breaks} breaks" if self.compiled else "eager"
        return f"Equal on {self.world_size} ranks ({mode}) within {self.tolerance:.0e}\n{table}"


@dataclasses.dataclass(frozen=True)
class _Job:
    build_model: Callable[[], nn.Module]
    build_batch: Callable[..., Any]
    world_size: int
    plan: PlanSpec
    steps: int
    backend: str | None
    input_placement: Placement
    gradient_reduction: str
    exchange_dtype: ExchangeDtype
    example_inputs: bool
    dtype: torch.dtype
    optimizer: str
    loss: Callable[[Any], Tensor]
    train: bool


def verify(
    build_model: Callable[[], nn.Module],
    build_batch: Callable[..., Any],
    world_size: int = 2,
    *,
    plan: PlanSpec = "colwise",
    steps: int = 2,
    compile: bool | str = True,
    backend: str = "gloo",
    input_placement: Placement = Shard(0),
    gradient_reduction: str = MEAN,
    exchange_dtype: ExchangeDtype = None,
    example_inputs: bool = False,
    dtype: torch.dtype = torch.float64,
    optimizer: str = "sgd",
    loss: Callable[[Any], Tensor] | None = None,
    train: bool = True,
    tolerance: float | None = None,
    timeout: float = 600,
) -> Certificate:
    """Runs the original and the sharded model side by side in fresh processes and compares everything.

    Args:
        build_model: makes the model; the same one on every call, whatever the random seed was before.
        build_batch: makes one rank's arguments of the model: a tuple, or (args, kwargs). Called with (rank, step),
            with one number that differs for each rank and step, or with nothing after `torch.manual_seed` of that
            number, by how many arguments it takes. All of these functions must be importable: top-level functions of a
            module.
        world_size: number of processes.
        plan: as in `autoshard`.
        steps: optimizer steps.
        compile: True for Inductor, the name of another backend of torch.compile, or False for eager mode.
        backend: of torch.distributed.
        input_placement: as in `autoshard`; with `Replicate()` all ranks get the batch of rank 0.
        gradient_reduction: as in `autoshard`.
        exchange_dtype: as in `autoshard`; the tolerance is then at least that of this dtype.
        example_inputs: True gives `autoshard` the first batch, so that the model is captured by torch.export.
        dtype: floating point parameters, buffers and inputs are converted to it.
        optimizer: "sgd", "adam" or "adagrad".
        loss: of one rank's output; a weighted sum over all of the output's floating point tensors if None.
        train: whether the model runs in training mode.
        tolerance: largest difference, relative to the largest value of the original's tensor; by dtype if None.
        timeout: seconds for everything.

    Returns:
        What was compared, with the differences.

    Raises:
        EquivalenceError: naming what differs, by how much.
        AutoshardError: what `autoshard` raised.
    """
    job = _Job(
        build_model,
        build_batch,
        world_size,
        plan,
        steps,
        "inductor" if compile is True else compile or None,
        input_placement,
        gradient_reduction,
        exchange_dtype,
        example_inputs,
        dtype,
        optimizer,
        loss or weighted_sum,
        train,
    )
    comparisons, graphs, breaks, used = launch(_verify_on_rank, (job,), world_size, backend, timeout)[0]
    limit = _tolerance(dtype, exchange_dtype) if tolerance is None else tolerance
    certificate = Certificate(comparisons, limit, world_size, job.backend is not None, graphs, breaks, used)
    wrong = [c for c in comparisons if not c.difference <= limit]
    if wrong:
        raise EquivalenceError(_report(wrong, limit))
    return certificate


def _tolerance(dtype: torch.dtype, exchange_dtype: ExchangeDtype) -> float:
    """Of the narrowest dtype that values have on their way."""
    wires = exchange_dtype if isinstance(exchange_dtype, tuple) else (exchange_dtype,)
    return max(_TOLERANCE[narrower(dtype, wire)] for wire in wires)


def _report(wrong: list[Comparison], limit: float) -> str:
    worst = sorted(wrong, key=lambda c: (c.step, ("output", "gradient", "parameter").index(c.what)))[:5]
    listing = "; ".join(f"{c.what} {c.name} by {c.difference:.2e} in step {c.step}" for c in worst)
    return describe(
        "verify()",
        f"{len(wrong)} tensors differ, first {listing}",
        f"differences up to {limit:.0e} of the largest value",
        "If build_model and build_batch give the same each time, this is a fault of autoshard: please report it.",
    )


def weighted_sum(output: Any) -> Tensor:
    """A loss in which every element of every floating point tensor of the output counts, each with another weight."""
    terms = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad and leaf.numel():
            steps = torch.arange(leaf.numel(), dtype=leaf.dtype, device=leaf.device)
            terms.append((leaf.flatten() * torch.cos(steps + 1)).mean())
    return torch.stack(terms).sum()


def _verify_on_rank(job: _Job) -> tuple[tuple[Comparison, ...], int, int, ShardingPlan]:
    """One rank's part; the comparisons are made on rank 0, the others return none."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    original, model = (_model(job, device) for _ in range(2))
    if rank != 0:
        del original
    batches = _Batches(job, device)
    example = batches.at(0, 0) if job.example_inputs else None
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    sharded = autoshard(
        model,
        mesh,
        plan=job.plan,
        example_inputs=example,
        input_placement=job.input_placement,
        gradient_reduction=job.gradient_reduction,
        exchange_dtype=job.exchange_dtype,
    )
    plan = sharding_plan(sharded)
    torch._dynamo.reset()
    step_model = sharded if job.backend is None else torch.compile(sharded, backend=job.backend)
    mine = _train(job, step_model, sharded, batches, [rank], mesh)
    outputs: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object([step.outputs[0] for step in mine], outputs)
    counters = torch._dynamo.utils.counters
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    if outputs is None:
        return (), graphs, breaks, plan
    ranks = range(dist.get_world_size()) if isinstance(job.input_placement, Shard) else range(1)
    expected = _train(job, original, original, batches, list(ranks), None)
    return tuple(_compare(expected, mine, outputs)), graphs, breaks, plan


def _model(job: _Job, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = job.build_model().to(device)
    model = model.to(job.dtype)
    return model.train(job.train)


class _Batches:
    """One rank's arguments in one step."""

    def __init__(self, job: _Job, device: torch.device) -> None:
        self._job, self._device = job, device
        self._arity = len(inspect.signature(job.build_batch).parameters)

    def at(self, rank: int, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rank = rank if isinstance(self._job.input_placement, Shard) else 0
        seed = step * self._job.world_size + rank
        torch.manual_seed(seed)
        made = self._job.build_batch(*[(), (seed,), (rank, step)][self._arity])
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], tuple) and isinstance(made[1], dict):
            args, kwargs = made
        else:
            args, kwargs = (made if isinstance(made, tuple) else (made,)), {}
        return pytree.tree_map(self._convert, (args, kwargs))  # type: ignore[no-any-return]  # the pair again

    def _convert(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(self._device, self._job.dtype if leaf.is_floating_point() else leaf.dtype)


@dataclasses.dataclass(frozen=True)
class _Step:
    outputs: list[list[Tensor]]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]


def _train(
    job: _Job,
    forward: Callable[..., Any],
    model: nn.Module,
    batches: _Batches,
    ranks: list[int],
    mesh: DeviceMesh | None,
) -> list[_Step]:
    """The steps of a training, with the gradient of all `ranks`' losses together; `mesh` is that of a sharded model."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _OPTIMIZERS[job.optimizer](trained, lr=0.1) if trained else None
    steps = []
    for step in range(job.steps):
        outputs = []
        for rank in ranks:
            args, kwargs = batches.at(rank, step)
            torch.manual_seed(1_000_000 + step * job.world_size + rank)
            out = forward(*args, **kwargs)
            leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
            outputs.append([leaf.detach().clone() for leaf in leaves])
            if trained:
                divisor = 1 if job.gradient_reduction == SUM else len(ranks)
                (job.loss(out) / divisor).backward()
        shapes = local_shapes(model)
        gradients = {name: whole_gradient(p, shapes.get(name), mesh) for name, p in model.named_parameters()}
        gradients = {name: None if g is None else g.clone() for name, g in gradients.items()}
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        parameters = {name: whole(p, shapes.get(name), mesh).clone() for name, p in model.named_parameters()}
        steps.append(_Step(outputs, gradients, parameters))
    return steps


def _compare(expected: list[_Step], sharded: list[_Step], outputs: list[Any]) -> list[Comparison]:
    found = []
    for step, (want, got) in enumerate(zip(expected, sharded, strict=True)):
        for rank, by_rank in enumerate(outputs):
            reference = want.outputs[rank if len(want.outputs) > 1 else 0]
            if len(reference) != len(by_rank[step]):
                raise EquivalenceError(f"the sharded model returns {len(by_rank[step])} tensors, not {len(reference)}")
            for index, (a, b) in enumerate(zip(reference, by_rank[step], strict=True)):
                found.append(Comparison("output", f"{index} of rank {rank}", step, _difference(a, b)))
        for what in ("gradient", "parameter"):
            references, values = getattr(want, f"{what}s"), getattr(got, f"{what}s")
            floor = _SMALLEST_SCALE * max((_largest(r) for r in references.values() if r is not None), default=0.0)
            for name, reference in references.items():
                found.append(Comparison(what, name, step, _difference(reference, values[name], floor)))
    return found


def _difference(expected: Tensor | None, got: Tensor | None, floor: float = 0.0) -> float:
    """Relative to the largest value, or `floor`; infinite where shapes, dtypes or presence differ.

    None equals a zero gradient.
    """
    if expected is None or got is None:
        present = got if expected is None else expected
        return 0.0 if present is None or not present.any() else float("inf")
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    if expected.numel() == 0 or torch.equal(expected, got):
        return 0.0
    both_nan = expected.isnan() & got.isnan()
    difference = float((expected.double() - got.double()).abs().masked_fill(both_nan, 0).max())
    scale = max(_largest(expected), floor)
    return difference / scale if scale > 0 else difference


def _largest(tensor: Tensor) -> float:
    """The largest finite absolute value."""
    values = tensor.detach().double().abs()
    return float(values.masked_fill(~values.isfinite(), 0).max()) if values.numel() else 0.0
