"""What a rank does with a batch of cases: the sharded model beside the oracle, compared after every phase.

Needs no communication but that of the sharded model: every rank makes all ranks' batches and computes the oracle.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard import autoshard
from tests.matrix.case import BAG, EMBEDDING, LINEAR, Batch, Case, batches
from tests.matrix.layers import make_model
from tests.matrix.oracle import Expected, Oracle, make_optimizer

STEPS = 2
ARGUMENTS = {EMBEDDING: 1, BAG: 3, LINEAR: 1}

# Largest difference that counts as rounding, relative to the largest number of the whole tensor.
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-12}


def run_cases(mesh: DeviceMesh, cases: list[Case], backend: str | None = None) -> list[str]:
    """Runs every case, compiled with `backend` if there is one.

    Returns:
        What went wrong on this rank: a text per case that failed.
    """
    failures = []
    for number, case in enumerate(cases):
        print(f"{number} of {len(cases)}: {case}", flush=True)  # the pool shows the end of it, should a rank hang
        comparison = Comparison(case, backend, mesh.get_local_rank())
        try:
            _train(mesh, case, backend, comparison)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            where = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
            comparison.differences.append(f"{type(error).__name__}: {str(error)[:300]} ({where})")
        if comparison.differences:
            # The first is the cause of the others.
            failures.append(f"{case}: {comparison.differences[0]}")
    return failures


def _train(mesh: DeviceMesh, case: Case, backend: str | None, comparison: Comparison) -> None:
    """Goes on after a difference: a rank that left there would leave the others waiting for it."""
    place = mesh.get_local_rank()
    oracle = Oracle(case)
    model = autoshard(
        make_model(case),
        mesh,
        {"*": "replicate"} if case.plan == "replicate" else case.plan,
        input_placement=Replicate() if case.replicated else Shard(0),
        gradient_reduction=case.gradients,
        **({"ragged": True} if case.ragged else {}),
    )
    parameters = list(model.parameters())
    optimizer = make_optimizer(case, parameters)
    call: Callable[..., Tensor] = model
    if backend is not None:
        torch._dynamo.reset()
        call = torch.compile(model, backend=backend, fullgraph=True)
    for step in range(STEPS):
        made = batches(case, step)
        before = [_local(parameter).clone() for parameter in parameters]
        want = oracle.step(made)
        arguments, leaf = _arguments(case, made[place])
        comparison.moment = f"step {step}"
        out = call(*arguments[: ARGUMENTS[case.op]])
        comparison.of_forward(want, out.detach(), parameters)
        if case.op != LINEAR:
            comparison.of_rows(made, before, parameters)
        optimizer.zero_grad()
        out.backward(made[place].gradient)
        comparison.of_backward(want, parameters, leaf)
        optimizer.step()
        comparison.of_step(want, parameters)


def _arguments(case: Case, batch: Batch) -> tuple[list[Tensor | None], Tensor | None]:
    """What the model is called with, and which of it gets a gradient: a leaf with the strides of the batch."""
    operand = batch.input if case.op == LINEAR else batch.weights
    leaf = None if operand is None else operand.detach().requires_grad_()
    return [leaf if argument is operand else argument for argument in batch.arguments], leaf


@dataclass
class Comparison:
    """The differences between one rank's part of a sharded model and the oracle.

    Lookups are bit-equal, in eager mode and with aot_eager. Rounding differs where a norm (not a largest or
    smallest one) or a dot product is added up over the ranks, and wherever Inductor has chosen the order.
    """

    case: Case
    backend: str | None
    place: int
    moment: str = ""
    differences: list[str] = field(default_factory=list)

    @property
    def _gradients_round(self) -> bool:
        """A whole weight's gradient is added up rank by rank, and torch sorts more ids where there is a tail."""
        case = self.case
        whole = case.plan == "replicate" and not case.replicated
        return case.op == LINEAR or whole or case.tail > 0 or self.backend == "inductor"

    @property
    def _weights_round(self) -> bool:
        """The largest or smallest magnitude of a row is exact; what torch makes of it in float64 is not known."""
        case = self.case
        exact_norm = math.isinf(case.norm_type) and case.dtype != "float64"
        return self._gradients_round or (case.max_norm is not None and not exact_norm)

    def of_forward(self, want: Expected, out: Tensor, parameters: list[nn.Parameter]) -> None:
        """The output, which must be contiguous, and the weights, which max_norm may have changed."""
        self._tensors("output", out, want.outputs[self.place], self._weights_round)
        if not out.is_contiguous():
            self._note(f"the output has strides {out.stride()}")
        for number, parameter in enumerate(parameters):
            placement = Replicate() if self.case.plan == "replicate" else Shard(self._feature_dim)
            placed = isinstance(parameter, DTensor) and parameter.placements == (placement,)
            if not parameter.is_leaf or not (placed or self.case.sparse):
                self._note(f"parameter {number} is no leaf that is a DTensor of {placement}")
            what = f"weight {number} after the forward"
            self._parameter(what, _local(parameter), want.renormed[number], self._weights_round)

    def of_rows(self, made: list[Batch], before: list[Tensor], parameters: list[nn.Parameter]) -> None:
        """Rows that no id has looked up are what they were, to the last bit."""
        untouched = torch.ones(self.case.rows, dtype=torch.bool)
        if self.case.max_norm is not None:
            untouched[torch.cat([batch.input.flatten() for batch in made]).long()] = False
        if not torch.equal(_local(parameters[0])[untouched], before[0][untouched]):
            self._note("the forward changed rows that were not looked up")

    def of_backward(self, want: Expected, parameters: list[nn.Parameter], leaf: Tensor | None) -> None:
        """Every gradient."""
        for number, parameter in enumerate(parameters):
            if parameter.grad is None and self.case.sparse and parameter.numel() == 0:
                continue  # a rank without columns has no sparse gradient
            if parameter.grad is None or isinstance(parameter.grad, DTensor) != isinstance(parameter, DTensor):
                self._note(f"the gradient of parameter {number} is a {type(parameter.grad).__name__}")
                continue
            local = _local(parameter.grad)
            if local.is_sparse != self.case.sparse:
                self._note(f"the layout of gradient {number} is {local.layout}")
            dense = local.to_dense() if local.is_sparse else local
            self._parameter(f"gradient {number}", dense, want.gradients[number], self._gradients_round)
        expected = want.input_gradients[self.place]
        if leaf is not None and expected is not None:
            if leaf.grad is None:
                self._note("the input got no gradient")
            else:
                self._tensors("gradient of the input", leaf.grad, expected, True)

    def of_step(self, want: Expected, parameters: list[nn.Parameter]) -> None:
        """The weights after the optimizer."""
        rounding = self._weights_round or self.case.optimizer != "sgd"
        for number, parameter in enumerate(parameters):
            what = f"weight {number} after the optimizer"
            self._parameter(what, _local(parameter), want.weights[number], rounding)

    @property
    def _feature_dim(self) -> int:
        return 0 if self.case.op == LINEAR else 1

    def _columns(self, whole: Tensor) -> Tensor:
        """What this rank holds of a parameter."""
        if self.case.plan == "replicate":
            return whole
        pieces = whole.chunk(self.case.world, self._feature_dim)
        return pieces[self.place] if self.place < len(pieces) else whole.narrow(self._feature_dim, 0, 0)

    def _parameter(self, what: str, got: Tensor, whole: Tensor, rounding: bool) -> None:
        """This rank's part of a parameter or gradient. It may be one number, in which a long sum has cancelled."""
        self._tensors(what, got, self._columns(whole), rounding, _largest(whole))

    def _tensors(self, what: str, got: Tensor, want: Tensor, rounding: bool, scale: float | None = None) -> None:
        if got.shape != want.shape or got.dtype != want.dtype:
            self._note(f"{what} is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}")
        elif not torch.equal(got, want):
            scale = max(_largest(want) if scale is None else scale, 1e-30)
            limit = TOLERANCE[self.case.dtype] * scale if rounding else 0.0
            largest = _largest(got.double() - want.double())
            if not largest <= limit:
                some = f"{int((got != want).sum())} of {want.numel()}"
                self._note(f"{what}: {some} differ, by up to {largest:.3e}; allowed is {limit:.3e}")

    def _note(self, difference: str) -> None:
        self.differences.append(f"{self.moment}: {difference}")


def _largest(x: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    return math.nan if x.isnan().any() else float(x.abs().max()) if x.numel() else 0.0


def _local(x: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient; DTensor carries no sparse gradient, such tables are plain ones."""
    with torch.no_grad():
        local: Tensor = x.detach().to_local() if isinstance(x, DTensor) else x.detach()
    return local
