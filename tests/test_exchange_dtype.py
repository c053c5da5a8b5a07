"""Results and their gradients travel in a narrower dtype: each number is rounded once, and nothing else is.

Weights, ids and x are whole numbers, the gradients that come in are random: what is multiplied and added is exact
whatever the order, so that the sharded model and one process, which rounds at the same places, agree to the last bit.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from autoshard import autoshard, graph_diff, verify
from autoshard.parameters import whole_gradient
from passes.plan import Colwise
from passes.traffic import BACKWARD, FORWARD
from tests.counting import counting_mesh
from tests.models import dense, dlrm, ids, model_of
from tests.pool import Pool

BF16, FP16 = torch.bfloat16, torch.float16
WIRES = [BF16, (FP16, None), (None, BF16), (FP16, BF16)]
MODES = ["batch-sharded", "replicated", "ragged", "owned"]
ROWS = 5


class Layers(nn.Module):
    """A layer of each kind: x (B, 3), ids (B, 3) -> (B, 7), (B, 2), (B, 6); fewer columns than ranks among them."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        made = [nn.EmbeddingBag(11, 7, mode="sum"), nn.Embedding(11, 2), nn.Linear(3, 6)]
        self.layers = nn.ModuleList(made[-layers:])
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            # Sums are above 2^8, where bfloat16 has not all whole numbers, and above 2^11, where float16 has not.
            parameter.data = torch.randint(-4000, 4000, parameter.shape, generator=generator).float()

    def forward(self, x: Tensor, ids: Tensor) -> list[Tensor]:
        inputs = [ids, ids[:, 0], x][-len(self.layers) :]
        return [layer(entered) for layer, entered in zip(self.layers, inputs, strict=True)]


class _Rounded(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: torch.dtype | None, backward: torch.dtype | None) -> Tensor:
        ctx.dtype = backward
        return _round(x, forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _round(gradient, ctx.dtype), None, None


def _round(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x.clone() if dtype is None else x.to(dtype).to(x.dtype)


def batch(rank: int, rows: int) -> tuple[Tensor, Tensor]:
    return dense(rows, rank, 3).mul(8).round().float(), ids(rows, rank + 100, 11, 3)


def upstream(rank: int, shapes: list[torch.Size]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    # Eight bits: with whole numbers every product and sum is exact in float64, rounded to an exchange dtype or not.
    return [torch.randn(shape, generator=generator, dtype=torch.float64).mul(4096).round() / 4096 for shape in shapes]


def unequal(mesh: DeviceMesh, mode: str, wire: Any, backend: str | None, layers: int = 3) -> list[str]:
    """What differs from one process, to the last bit: outputs of this rank, gradients of all parameters and of x."""
    rank, world = mesh.get_local_rank(), mesh.size()
    ranks = 1 if mode == "replicated" else world
    rows = [ROWS + (place if mode == "ragged" else 0) for place in range(ranks)]
    place = 0 if mode == "replicated" else rank
    plan: Any = {"layers.0.weight": Colwise((0,)), "layers.1.weight": Colwise((world - 1,))}
    original = Layers(layers).double()
    sharded = autoshard(
        copy.deepcopy(original),
        mesh,
        plan if mode == "owned" else "colwise",
        input_placement=Replicate() if mode == "replicated" else Shard(0),
        gradient_reduction="sum",
        ragged=mode == "ragged",
        exchange_dtype=wire,
    )
    run: Any = sharded if backend is None else torch.compile(sharded, backend=backend, fullgraph=True)
    batches = [batch(r, rows[r]) for r in range(ranks)]
    x, own_ids = batches[place]
    x = x.double().requires_grad_()
    outputs = run(x, own_ids)
    torch.autograd.backward(outputs, upstream(place, [out.shape for out in outputs]))

    all_x = torch.cat([pair[0] for pair in batches]).double().requires_grad_()
    forward, backward = wire if isinstance(wire, tuple) else (wire, wire)
    travelling = 2 if mode == "owned" else layers  # the linear is whole there
    plain = original(all_x, torch.cat([pair[1] for pair in batches]))
    results = [
        _Rounded.apply(out, forward, None if mode == "replicated" else backward) if n < travelling else out
        for n, out in enumerate(plain)
    ]
    assert forward is None or not any(torch.equal(*pair) for pair in zip(results[:travelling], plain, strict=False))
    shapes = [out.shape[1:] for out in results]
    parts = [upstream(r, [torch.Size((rows[r], *shape)) for shape in shapes]) for r in range(ranks)]
    torch.autograd.backward(results, [torch.cat(gradients) for gradients in zip(*parts, strict=True)])

    pairs = {
        f"output {n}": (out, want.split(rows)[place])
        for n, (out, want) in enumerate(zip(outputs, results, strict=True))
    }
    if mode != "owned" and x.grad is not None and all_x.grad is not None:
        pairs["x"] = (x.grad, all_x.grad.split(rows)[place])
    for (name, got), (_, want) in zip(sharded.named_parameters(), original.named_parameters(), strict=True):
        gradient = whole_gradient(got, None, mesh)
        assert gradient is not None and want.grad is not None
        pairs[name] = (gradient, want.grad)
    return [name for name, (got, want) in pairs.items() if got.dtype != want.dtype or not torch.equal(got, want)]


def cases(mesh: DeviceMesh, modes: list[str], wires: list[Any], backend: str | None) -> dict[str, list[str]]:
    found = {}
    for mode in modes:
        for wire in wires:
            if not (mode == "owned" and mesh.size() == 1):  # where nothing travels nothing is rounded
                found[f"{mode} {wire}"] = unequal(mesh, mode, wire, backend)
    return {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4))])
def test_results_and_gradients_are_rounded_once(pool: Pool, world_size: int) -> None:
    assert pool.run(cases, MODES, WIRES, None, world_size=world_size, timeout=120) == [{}] * world_size


@pytest.mark.parametrize("mode", ["batch-sharded", *(pytest.param(m, marks=pytest.mark.slow) for m in MODES[1:])])
def test_compiled_they_are_rounded_once(pool: Pool, mode: str) -> None:
    wires = [(FP16, BF16)]
    assert pool.run(cases, [mode], wires, "aot_eager", world_size=3, fresh_dynamo=True, timeout=240) == [{}] * 3


@pytest.mark.slow
def test_by_inductor_they_are_rounded_once(pool: Pool) -> None:
    arguments = (["batch-sharded", "replicated"], [BF16, (FP16, BF16)], "inductor")
    assert pool.run(cases, *arguments, world_size=2, fresh_dynamo=True, timeout=500) == [{}] * 2


@pytest.mark.parametrize("wire", [BF16, pytest.param((None, FP16), marks=pytest.mark.slow)])
def test_one_layer_alone_is_rounded_too(pool: Pool, wire: Any) -> None:
    """Nothing is merged there."""
    assert pool.run(unequal, "batch-sharded", wire, None, 1, world_size=3) == [[]] * 3


# ---------------------------------------------------------------- bytes


def bytes_of(mesh: DeviceMesh, wire: Any, replicated: bool) -> dict[str, tuple[float, float]]:
    """By direction, what the diff says of all ranks, and what left this rank; a model of float32."""
    counted, counter = counting_mesh(mesh)
    place = 0 if replicated else mesh.get_local_rank()
    inputs = batch(place, ROWS)
    placement = Replicate() if replicated else Shard(0)
    model = autoshard(
        Layers(), counted, "paired", example_inputs=inputs, input_placement=placement, exchange_dtype=wire
    )
    expressions = {way: graph_diff(model).bytes(way) for way in (FORWARD, BACKWARD)}
    # x and ids have a batch dimension each.
    said = {way: float(e.subs(dict.fromkeys(e.free_symbols, ROWS))) for way, e in expressions.items()}
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with counter.counting() as forward:
        outputs = run(*inputs)
    with counter.counting() as backward:
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
    seen = {FORWARD: sum(call.bytes_sent for call in forward), BACKWARD: sum(call.bytes_sent for call in backward)}
    return {way: (said[way], seen[way]) for way in seen}


def counted_bytes(mesh: DeviceMesh, wires: list[Any], replicated: bool) -> list[dict[str, tuple[float, float]]]:
    return [bytes_of(mesh, wire, replicated) for wire in wires]


@pytest.mark.slow
@pytest.mark.parametrize("replicated", [False, True])
def test_the_bytes_of_results_are_halved_and_told(pool: Pool, replicated: bool) -> None:
    wires = [None, BF16, (FP16, None), (None, BF16)]
    by_rank = pool.run(counted_bytes, wires, replicated, world_size=2, fresh_dynamo=True, timeout=120)
    totals = []
    for found in zip(*by_rank, strict=True):
        for way in (FORWARD, BACKWARD):
            assert sum(own[way][1] for own in found) == found[0][way][0]
        totals.append((found[0][FORWARD][0], found[0][BACKWARD][0]))
    (forward, backward), both, only_forward, only_backward = totals
    widths = (8 + 2 + 6) if replicated else (7 + 2 + 6)  # 7 columns are gathered as 2 times 4
    saved = ROWS * widths * 2
    gradients = 0 if replicated else saved  # of a gather every rank takes its columns
    assert both == (forward - saved, backward - gradients)
    assert only_forward == (forward - saved, backward)
    assert only_backward == (forward, backward - gradients)


# ---------------------------------------------------------------- the error


@pytest.mark.slow
def test_verify_takes_an_exchange_dtype() -> None:
    certificate = verify(_two_tower, _batch_of_two_tower, compile=False, exchange_dtype=BF16)
    assert certificate.tolerance == 5e-2
    # It is rounded: float64 alone agrees to 1e-12.
    assert max(c.difference for c in certificate.comparisons) > 1e-6


def _two_tower() -> nn.Module:
    return model_of("two_tower").make()


def _batch_of_two_tower(rank: int, step: int) -> Any:
    return model_of("two_tower").split(2, 3, step)[0][rank]


def losses(mesh: DeviceMesh, wire: Any, steps: int) -> list[tuple[float, float]]:
    """Of each step of the DLRM of the examples the loss, sharded and in one process."""
    rank, world, rows = mesh.get_local_rank(), mesh.size(), 16
    log = dlrm.make_click_log(1000, 4 * world * rows, 0).to(torch.device("cpu"), torch.float32)
    torch.manual_seed(0)
    single = dlrm.DLRM(1000, 16)
    sharded = autoshard(copy.deepcopy(single), mesh, "paired", exchange_dtype=wire)
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.01) for model in (single, sharded)]
    found = []
    for step in range(steps):
        start = step * world * rows
        loss = dlrm.train_step(sharded, optimizers[1], log.batch(start + rank * rows, rows))
        torch.distributed.all_reduce(loss, group=mesh.get_group())
        expected = dlrm.train_step(single, optimizers[0], log.batch(start, world * rows))
        found.append((float(loss) / world, float(expected)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("wire", [BF16, FP16])
def test_the_loss_of_the_example_parts_by_little(pool: Pool, wire: torch.dtype) -> None:
    """Later steps see the four batches again and again, until the loss is a 25th: what differs then has grown."""
    found = pool.run(losses, wire, 20, world_size=2, timeout=180)[0]
    relative = [abs(sharded - single) / single for sharded, single in found]
    print(wire, max(relative[:5]), max(relative), max(abs(a - b) for a, b in found), found[-1])
    assert 1e-6 < max(relative[:5]) < 1e-3
    assert max(abs(sharded - single) for sharded, single in found) < 0.02 * found[0][1]
