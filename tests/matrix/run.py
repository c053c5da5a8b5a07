"""What a rank does with a batch of cases: the sharded model beside the oracle, compared after every phase.

Needs no communication but that of the sharded model: every rank makes all ranks' batches and computes the oracle.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard import autoshard
from tests.matrix.case import BAG, EMBEDDING, LINEAR, Batch, Case, batches, initial_weights
from tests.matrix.oracle import Expected, Oracle, make_optimizer

STEPS = 2

# Largest difference that counts as rounding, relative to the largest number of the tensor.
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-12}


class Layers(nn.Module):
    """One layer, or two linears, and perhaps a view of the output."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layer = make_layer(case)
        linears = case.op == LINEAR and case.then is not None
        self.then = nn.Linear(case.columns, case.then or 1, case.bias, dtype=case.torch_dtype) if linears else None
        self.viewed = case.viewed

    def forward(self, *arguments: Any) -> Tensor:
        out: Tensor = self.layer(*arguments)
        if self.then is not None:
            out = self.then(F.gelu(out))
        return out.view(-1) if self.viewed else out


class EmbeddingFunction(nn.Module):
    """`F.embedding` with a weight of its own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(case.rows, case.columns, dtype=case.torch_dtype))
        self.options = lookup_options(case)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, **self.options)


class BagFunction(nn.Module):
    """`F.embedding_bag` with a weight of its own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(case.rows, case.columns, dtype=case.torch_dtype))
        self.options = {
            **lookup_options(case),
            "mode": case.mode,
            "include_last_offset": case.include_last_offset,
        }

    def forward(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return F.embedding_bag(ids, self.weight, offsets, per_sample_weights=weights, **self.options)


def lookup_options(case: Case) -> dict[str, Any]:
    return {
        "padding_idx": case.padding_idx,
        "max_norm": case.max_norm,
        "norm_type": case.norm_type,
        "scale_grad_by_freq": case.scale_grad_by_freq,
        "sparse": case.sparse,
    }


def make_layer(case: Case) -> nn.Module:
    if case.op == LINEAR:
        return nn.Linear(case.rows, case.columns, case.bias, dtype=case.torch_dtype)
    if case.functional:
        return EmbeddingFunction(case) if case.op == EMBEDDING else BagFunction(case)
    if case.op == EMBEDDING:
        return nn.Embedding(case.rows, case.columns, **lookup_options(case), dtype=case.torch_dtype)
    assert case.op == BAG
    return nn.EmbeddingBag(
        case.rows,
        case.columns,
        mode=case.mode,
        include_last_offset=case.include_last_offset,
        **lookup_options(case),
        dtype=case.torch_dtype,
    )


def make_model(case: Case) -> Layers:
    """The plain model, with the weights that the oracle starts from."""
    with torch.device("meta"):
        model = Layers(case)
    state = dict(zip([name for name, _ in model.named_parameters()], initial_weights(case), strict=True))
    model.load_state_dict(state, assign=True)
    return model


def run_cases(mesh: DeviceMesh, cases: list[Case], backend: str | None = None) -> list[str]:
    """Runs every case, compiled with `backend` if there is one.

    Returns:
        What went wrong on this rank: a line per case that failed.
    """
    failures = []
    for number, case in enumerate(cases):
        print(f"{number} of {len(cases)}: {case}", flush=True)  # the pool shows the end of it, should a rank hang
        try:
            # All of them: a rank that left at its first would leave the others waiting for it.
            found = next(iter(list(_differences(mesh, case, backend))), None)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            where = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
            found = f"{type(error).__name__}: {str(error)[:300]} ({where})"
        if found is not None:
            failures.append(f"{case}: {found}")
    return failures


def _differences(mesh: DeviceMesh, case: Case, backend: str | None) -> Iterator[str]:
    """Whatever differs, the cause before its consequences."""
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
        start = [_local(parameter).clone() for parameter in parameters]
        want = oracle.step(made)
        mine = made[place]
        leaf = _requiring_gradient(case, mine)
        arguments = [leaf if argument is mine.weights or case.op == LINEAR else argument for argument in mine.arguments]
        out = call(*arguments[: {LINEAR: 1, EMBEDDING: 1, BAG: 3}[case.op]])
        looked_up = torch.cat([batch.input.flatten() for batch in made]).long() if case.op != LINEAR else None
        yield from _compare_forward(case, step, place, want, out, parameters, start, looked_up)
        optimizer.zero_grad()
        out.backward(mine.gradient)
        yield from _compare_backward(case, step, place, want, parameters, leaf)
        optimizer.step()
        for number, parameter in enumerate(parameters):
            rounding = case.optimizer == "adam" or case.max_norm is not None or _gradient_rounds(case)
            whole = want.weights[number]
            yield from _compare(
                f"step {step}: weight {number} after the optimizer",
                _local(parameter),
                _columns(whole, case, place),
                case if rounding else None,
            )


def _compare_forward(
    case: Case,
    step: int,
    place: int,
    want: Expected,
    out: Tensor,
    parameters: list[nn.Parameter],
    start: list[Tensor],
    looked_up: Tensor | None,
) -> Iterator[str]:
    rounding = case.max_norm is not None or _gradient_rounds(case)
    yield from _compare(f"step {step}: output", out.detach(), want.outputs[place], case if rounding else None)
    out.view(-1)
    for number, parameter in enumerate(parameters):
        if not parameter.is_leaf or not isinstance(parameter, DTensor):
            yield f"step {step}: parameter {number} is no leaf, or no DTensor"
        placement = Replicate() if case.plan == "replicate" else Shard(_feature_dim(case))
        if parameter.placements != (placement,):
            yield f"step {step}: parameter {number} has {parameter.placements}"
        after = _local(parameter)
        whole = want.renormed[number]
        yield from _compare(
            f"step {step}: weight {number} after the forward",
            after,
            _columns(whole, case, place),
            case if rounding else None,
        )
        if looked_up is not None:
            untouched = torch.ones(case.rows, dtype=torch.bool)
            untouched[looked_up] = False
            if case.max_norm is None:
                untouched[:] = True
            if not torch.equal(after[untouched], start[number][untouched]):
                yield f"step {step}: the forward changed rows that were not looked up"


def _compare_backward(
    case: Case,
    step: int,
    place: int,
    want: Expected,
    parameters: list[nn.Parameter],
    leaf: Tensor | None,
) -> Iterator[str]:
    for number, parameter in enumerate(parameters):
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            yield f"step {step}: the gradient of parameter {number} is a {type(gradient).__name__}"
            return
        with torch.no_grad():  # with grad it would take a view, which a sparse tensor has none of
            local = gradient.to_local()
        if local.is_sparse != case.sparse:
            yield f"step {step}: the gradient's layout is {local.layout}"
        yield from _compare(
            f"step {step}: gradient {number}",
            local.to_dense() if local.is_sparse else local,
            _columns(want.gradients[number], case, place),
            case if _gradient_rounds(case) else None,
        )
    expected = want.input_gradients[place]
    if leaf is not None and expected is not None:
        if leaf.grad is None:
            yield f"step {step}: the input got no gradient"
            return
        yield from _compare(f"step {step}: gradient of the input", leaf.grad, expected, case)


def _gradient_rounds(case: Case) -> bool:
    """Whether the sum that makes a weight's gradient may be in another order than in one process.

    A replicated weight's gradient is added up rank by rank, and torch sorts other ids where there is a tail.
    """
    return case.op == LINEAR or (case.plan == "replicate" and not case.replicated) or case.tail > 0


def _compare(what: str, got: Tensor, want: Tensor, rounding: Case | None) -> Iterator[str]:
    """Bit for bit, or with the rounding of a case's dtype."""
    if got.shape != want.shape or got.dtype != want.dtype:
        yield f"{what}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    elif torch.equal(got, want):
        return
    elif rounding is None:
        yield f"{what}: {int((got != want).sum())} of {want.numel()} differ by up to {_largest(got - want):.3e}"
    else:
        limit = TOLERANCE[rounding.dtype] * max(_largest(want), 1e-30)
        if not _largest(got.double() - want.double()) <= limit:
            yield f"{what}: differs by {_largest(got.double() - want.double()):.3e}, more than {limit:.3e}"


def _largest(x: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    return math.nan if x.isnan().any() else float(x.abs().max()) if x.numel() else 0.0


def _columns(whole: Tensor, case: Case, place: int) -> Tensor:
    """What a rank holds of a parameter."""
    if case.plan == "replicate":
        return whole
    pieces = whole.chunk(case.world, _feature_dim(case))
    return pieces[place] if place < len(pieces) else whole.narrow(_feature_dim(case), 0, 0)


def _feature_dim(case: Case) -> int:
    return 0 if case.op == LINEAR else 1


def _local(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter, DTensor)
    local: Tensor = parameter.detach().to_local()
    return local


def _requiring_gradient(case: Case, batch: Batch) -> Tensor | None:
    """The operand of this rank that gets a gradient: a leaf with the strides of the batch."""
    operand = batch.input if case.op == LINEAR else batch.weights
    if operand is None:
        return None
    leaf = operand.detach()
    return leaf.requires_grad_()
