"""What a rank does in the tests of this folder, on any device: the sharded model beside one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

from autoshard import autoshard, parameters
from autoshard.parameters import local_shapes
from passes.errors import IdRangeError
from tests.benchmarks import gpu
from tests.compare import tensors
from tests.models import model_of, relative

MODELS = ("mlp", "two_tower", "dlrm", "transformer", "lookup", "bags", "offset_bag", "tied_head")
ROWS = 3


def mesh_of(kind: str) -> DeviceMesh:
    """All ranks; each its own GPU where there are enough, else all the first."""
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return init_device_mesh(kind, (dist.get_world_size(),))


def _moved(values: Any, kind: str) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(kind), values)


def _gap(original: nn.Module, sharded: nn.Module, part: str) -> float:
    """The largest relative difference of what every parameter has: itself, or its gradient."""
    found, shapes = dict(sharded.named_parameters()), local_shapes(sharded)
    worst = 0.0
    for name, want in original.named_parameters():
        got = found[name]
        if part == "grad":
            assert want.grad is not None
            assert got.grad is not None
            pair = want.grad.to_dense() if want.grad.is_sparse else want.grad, got.grad
        else:
            pair = want.detach(), got
        worst = max(worst, relative(pair[0], parameters.whole(pair[1], shapes.get(name))))
    return worst


def _beside(
    original: nn.Module, split: Any, mesh: DeviceMesh, compiled: bool, optimizer: Any = torch.optim.SGD
) -> float:
    kind, world, rank = mesh.device_type, mesh.size(), mesh.get_local_rank()
    original = original.to(kind)
    sharded = autoshard(copy.deepcopy(original), mesh, "colwise")
    run = torch.compile(sharded, fullgraph=True) if compiled else sharded
    steppers = [optimizer(m.parameters(), lr=0.1) for m in (original, sharded)]
    worst = 0.0
    for step in range(2):
        parts, everything = split(world, ROWS, step)
        (want,) = tensors(original(*_moved(everything, kind)))
        (got,) = tensors(run(*_moved(parts[rank], kind)))
        assert got.device.type == kind
        worst = max(worst, relative(want.chunk(world)[rank].detach(), got.detach()))
        want.square().mean().backward()
        got.square().mean().backward()
        worst = max(worst, _gap(original, sharded, "grad"))
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        worst = max(worst, _gap(original, sharded, "value"))
    return worst


def model_beside_one_process(kind: str, name: str, compiled: bool) -> float:
    case = model_of(name)
    return _beside(case.make(), case.split, mesh_of(kind), compiled)


@dataclass(frozen=True)
class Replayed:
    """A model compiled into CUDA graphs, over three batches: one warms up, one is recorded, the last is replayed only.

    gap: the largest relative difference from the model compiled without, of results, gradients and parameters.
    left_out: what Inductor makes no CUDA graph of.
    recorded, replayed: CUDA graphs, with the last batch.
    """

    gap: float
    left_out: int
    recorded: int
    replayed: int


def replayed_beside_compiled(kind: str, name: str) -> Replayed:
    mesh, case = mesh_of(kind), model_of(name)
    original = case.make().to(kind)
    plain, graphs = (autoshard(copy.deepcopy(original), mesh, "colwise") for _ in range(2))
    run_plain = torch.compile(plain, fullgraph=True)
    run_graphs = torch.compile(graphs, fullgraph=True, mode="reduce-overhead")
    skipped, gap, calls = counters["inductor"]["cudagraph_skips"], 0.0, {}
    # In one part: Inductor would otherwise leave out in silence what cannot be recorded.
    with inductor.patch(graph_partition=False):
        for step in range(3):
            batch = _moved(case.split(mesh.size(), ROWS, step)[0][mesh.get_local_rank()], kind)
            want = _trained(run_plain, batch)
            with _counted("capture_begin") as recorded, _counted("replay") as replayed:
                got = _trained(run_graphs, batch)
            gap = max(gap, *(relative(one, other) for one, other in zip(want, got, strict=True)))
            calls = {"recorded": recorded.call_count, "replayed": replayed.call_count}
    return Replayed(gap, counters["inductor"]["cudagraph_skips"] - skipped, **calls)


def _trained(run: Any, batch: Any) -> list[torch.Tensor]:
    """Copies of a step's results, of the gradients and of the new parameters: this rank's part of each."""
    (out,) = tensors(run(*batch))
    out.square().mean().backward()
    own = [parameter.detach().to_local() for parameter in run.parameters()]
    gradients = [parameter.grad.to_local() for parameter in run.parameters()]
    for value, gradient in zip(own, gradients, strict=True):
        value.sub_(gradient, alpha=0.1)
    found = [x.detach().clone() for x in (out, *gradients, *own)]
    run.zero_grad()
    return found


def _counted(method: str) -> Any:
    """Counts the calls of a method of all CUDA graphs."""
    graph = torch.cuda.CUDAGraph
    return mock.patch.object(graph, method, autospec=True, side_effect=getattr(graph, method))


def share_of_the_copy(kind: str) -> float:
    """The bandwidth of lookup, pooling and rearrangement over that of a copy."""
    return gpu.shares(gpu.front(gpu.FRONTS[kind], mesh_of(kind), rounds=21))[gpu.WHOLE]


def max_norm_beside_one_process(kind: str) -> float:
    torch.manual_seed(0)
    layer = nn.EmbeddingBag(23, 7, mode="sum", max_norm=1.25, norm_type=1.0).double()
    return _beside(layer, model_of("lookup").split, mesh_of(kind), False)


def sparse_adam_beside_one_process(kind: str) -> float:
    torch.manual_seed(0)
    layer = nn.EmbeddingBag(23, 7, mode="sum", sparse=True).double()
    return _beside(layer, model_of("lookup").split, mesh_of(kind), False, torch.optim.SparseAdam)


def rows_that_differ_between_ranks(kind: str) -> float:
    """Rank r has r + 1 rows: sizes travel before values."""
    mesh = mesh_of(kind)
    torch.manual_seed(0)
    original = nn.Embedding(23, 7).double().to(kind)
    sharded = autoshard(copy.deepcopy(original), mesh, "colwise", ragged=True)
    ids = torch.arange(mesh.get_local_rank() + 1, device=kind)
    return relative(original(ids).detach(), sharded(ids).detach())


def a_bad_id_on_the_last_rank(kind: str) -> str:
    """The error that this rank raises."""
    mesh = mesh_of(kind)
    sharded = autoshard(nn.Embedding(23, 7).to(kind), mesh, "colwise")
    last = mesh.get_local_rank() == mesh.size() - 1
    try:
        sharded(torch.tensor([1, 99 if last else 2], device=kind))
    except IdRangeError as error:
        return str(error)
    return ""


def bytes_held(kind: str) -> tuple[int, int]:
    """Bytes that a rank's GPU holds of a table of 64 MB after sharding (what the shard has, on a CPU); of the whole."""
    mesh = mesh_of(kind)
    table = nn.Embedding(125_000, 128).to(kind)
    whole = table.weight.nbytes
    sharded = autoshard(table, mesh, "colwise")
    del table
    held = torch.cuda.memory_allocated() if kind == "cuda" else sharded.weight.to_local().untyped_storage().nbytes()  # type: ignore[operator, union-attr]
    return held, whole
