"""Compiles a training step for a GPU, sharded or not, on a machine that need not have one, and tells what comes out.

    build() -> model, example inputs        shapes only: on the meta device where the model can be made there
    -> autoshard on a fake process group    the plan, the graphs, parameters without storage
    -> Dynamo, AOTAutograd, Inductor        one program forward, one backward
    -> Triton                               a cubin for each kernel

What is counted is what Inductor wrote: nothing is run, and no time is estimated.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.utils import _pytree as pytree

from autoshard.api import Prepared, Settings, install, prepare
from autoshard.export import arguments
from autoshard.gpu_program import Program, collectives_of, cubin, read_program
from autoshard.planner import PlanSpec
from autoshard.pretend_gpu import DEVICE, gpu_of, pretend_gpu
from passes.errors import CaptureError, describe
from passes.traffic import BACKWARD, FORWARD, W

Build = Callable[[], tuple[nn.Module, Any]]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled training step; `backward` is None for a model without gradients.

    Attributes:
        arch: what it is compiled for.
        world_size: ranks; 1 for a model before sharding.
        prepared: plan and diff; None for a model before sharding.
    """

    arch: str
    world_size: int
    prepared: Prepared | None
    forward: Program
    backward: Program | None

    @property
    def programs(self) -> tuple[Program, ...]:
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    def cubins(self) -> dict[str, bytes]:
        """The machine code of every kernel that the programs launch, by Triton."""
        return {
            f"{program.direction} {name}": cubin(source, self.arch)
            for program in self.programs
            for name, source in program.kernels.items()
        }


def compile_sharded(
    build: Build,
    world_size: int,
    arch: str,
    *,
    plan: PlanSpec = "auto",
    input_placement: Placement = Shard(0),
    options: dict[str, Any] | None = None,
) -> Compiled:
    """Shards what `build` makes over a fake process group, and compiles a step of the first rank.

    Args:
        build: returns the model and one rank's example inputs.
        world_size: number of ranks.
        arch: "sm_80" or "sm_90".
        plan, input_placement: as `autoshard()` takes them.
        options: as `torch.compile` takes them.

    Raises:
        NoGpuCompiler: if this installation cannot compile for a GPU.
        AutoshardError: what `autoshard()` raises.
    """
    gpu_of(arch)
    with _fake_group(world_size) as group:
        model, inputs = _shapes_of(build)
        settings = Settings(group, world_size, input_placement, "mean", ragged=False, device_type="cuda")
        prepared = prepare(model, plan, inputs, settings)
        return _compiled(model, inputs, arch, prepared, settings, options)


def compile_original(build: Build, arch: str, *, options: dict[str, Any] | None = None) -> Compiled:
    """The same of the model before sharding, on one rank's inputs."""
    gpu_of(arch)
    model, inputs = _shapes_of(build)
    return _compiled(model, inputs, arch, None, None, options)


class _fake_group:
    """A process group that sends nothing; its name."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __enter__(self) -> str:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.world_size)
        group = dist.group.WORLD
        assert group is not None
        return group.group_name

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def _shapes_of(build: Build) -> tuple[nn.Module, Any]:
    """What `build` makes, without values where that works: tables of any size take no memory."""
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # whatever a model raises that needs values
        return build()


def _compiled(
    model: nn.Module,
    inputs: Any,
    arch: str,
    prepared: Prepared | None,
    settings: Settings | None,
    options: dict[str, Any] | None,
) -> Compiled:
    programs: list[Program] = []
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def inner(graph_module: fx.GraphModule, examples: Any, **kwargs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        collectives = collectives_of(graph_module)
        output = compile_fx_inner(copy.deepcopy(graph_module), examples, **kwargs)
        programs.append(read_program(seen.pop(), collectives, graph_module, output, bool(kwargs.get("is_backward"))))

        def run(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            with mode:
                return graph_module(*given)

        vars(run)["_boxed_call"] = True
        return run

    def backend(graph_module: fx.GraphModule, examples: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        # As under mode="reduce-overhead", so that Inductor says what would keep it from that; in one part, as it would
        # otherwise say nothing and leave that part out.
        patches = {"triton.cudagraphs": True, "graph_partition": False, **(options or {})}
        return compile_fx(graph_module, examples, inner_compile=inner, config_patches=patches)

    seen: list[tuple[str, int]] = []

    def on_program(lowering: Any) -> Any:
        code, _ = lowering.codegen()
        seen.append((code.value, int(lowering.count_bytes()[0])))
        lowering.cache_key, lowering.cache_path, lowering.cache_linemap = "", "/dev/null", []
        return types.SimpleNamespace(call=None, __file__="/dev/null")

    torch._dynamo.reset()
    try:
        with pretend_gpu(arch, on_program):
            if prepared is None or settings is None:
                mesh = None
            else:
                _replace(model, lambda p: _parameter(_empty(p, mode, torch.device("cpu")), p))
                install(model, prepared, init_device_mesh("cpu", (settings.world_size,)), {}, settings)
                mesh = init_device_mesh("cuda", (settings.world_size,))
            _replace(model, lambda p: _on_gpu(p, mode, mesh))
            args, kwargs = pytree.tree_map_only(Tensor, lambda x: _empty(x, mode, DEVICE), arguments(inputs))
            torch.compile(model, fullgraph=True, backend=backend)(*args, **kwargs)
    finally:
        torch._dynamo.reset()
    forward = [program for program in programs if program.direction == FORWARD]
    backward = [program for program in programs if program.direction == BACKWARD]
    if len(forward) != 1:
        raise CaptureError(
            describe(
                "compile",
                f"the model became {len(forward)} graphs",
                "one graph, with something to compute in it",
                "Give the function's model an input that it computes with.",
            )
        )
    world_size = 1 if settings is None else settings.world_size
    return Compiled(arch, world_size, prepared, forward[0], backward[0] if backward else None)


def _replace(model: nn.Module, new: Callable[[Tensor], Tensor]) -> None:
    """Puts new parameters and buffers in place of a model's own. Ties stay ties."""
    made: dict[int, Tensor] = {}
    old = []  # an id is a tensor's own only as long as the tensor lives
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    old.append(tensor)
                    made.setdefault(id(tensor), new(tensor))
                    tensors[name] = made[id(tensor)]  # type: ignore[assignment]


def _empty(x: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device, requires_grad=False)


def _parameter(value: Tensor, of: Tensor) -> Tensor:
    return nn.Parameter(value, requires_grad=of.requires_grad) if isinstance(of, nn.Parameter) else value


def _on_gpu(tensor: Tensor, mode: FakeTensorMode, mesh: DeviceMesh | None) -> Tensor:
    if not isinstance(tensor, DTensor):
        return _parameter(_empty(tensor, mode, DEVICE), tensor)
    assert mesh is not None
    local = _empty(tensor.to_local().detach(), mode, DEVICE)
    moved = DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return _parameter(moved, tensor)


# ---------------------------------------------------------------- for people


def report(sharded: Compiled, original: Compiled) -> str:
    """A table of both: kernels, library calls, collectives and bytes, forward and backward; then the names."""
    rows = [
        [which, *_row(program, compiled.world_size)]
        for which, compiled in (("before", original), ("sharded", sharded))
        for program in compiled.programs
    ]
    headers = ["", "direction", "kernels", "library calls", "collectives", "memory bytes", "wire bytes", "host waits"]
    table = tabulate(rows, headers=headers, disable_numparse=True, colalign=("left",) * 2 + ("right",) * 6)
    lines = [
        table,
        f"Per step of the first of {sharded.world_size} ranks, for {sharded.arch}; wire bytes: all ranks together. "
        f"{len(sharded.cubins())} of the sharded step's kernels compiled to machine code.",
    ]
    for program in sharded.programs:
        lines.append(f"\n{program.direction}, in order:")
        lines += [f"  {kind:10} {name}{times}" for kind, name, times in _runs(program)]
        if program.no_cuda_graph is not None:
            lines.append(f"  no CUDA graph: {program.no_cuda_graph.splitlines()[0]}")
    return "\n".join(lines)


def _row(program: Program, world_size: int) -> list[str]:
    kinds = collections.Counter(item.collective for item in program.collectives)
    counts = ", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "0"
    wire = sum((item.bytes for item in program.collectives), sympy.Integer(0)).subs(W, world_size)
    return [
        program.direction,
        str(len(program.of("kernel"))),
        str(len(program.of("library"))),
        counts,
        f"{program.memory_bytes:,}",
        f"{int(wire):,}",
        str(len(program.synchronisations)),
    ]


def _runs(program: Program) -> Iterator[tuple[str, str, str]]:
    """The steps, those that follow one another under one name as one line."""
    previous: list[Any] = []
    for step in [*program.steps, None]:
        key = None if step is None else (step.kind, re.sub(r"_\d+$", "", step.name))
        if previous and key != previous[0]:
            (kind, name), number = previous
            yield kind, name, f" ({number} times)" if number > 1 else ""
            previous = []
        previous = [key, previous[1] + 1 if previous else 1]
