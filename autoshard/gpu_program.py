"""What Inductor writes for a GPU, read: kernels, library calls, collectives and waits of a program, in its order."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sympy
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autoshard.pretend_gpu import pretend_gpu
from passes.traffic import BACKWARD, FORWARD, Traffic, traffic

_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}
# A call of one of these in a program makes the host wait for the device.
_SYNCHRONISING = ("item", "tolist", "cpu", "synchronize", "_local_scalar_dense", "nonzero", "unique")


@dataclasses.dataclass(frozen=True)
class Step:
    """A thing that a program does on the device, in its order.

    Attributes:
        kind: "kernel" (of Triton), "library" (a kernel of torch's own or of cuBLAS), "collective", "wait" or "copy".
        name: of the kernel, the operator or the collective.
        reads: the names of the program's buffers that stand in the call.
        makes: the name that the result is given; None if the call returns none.
    """

    kind: str
    name: str
    reads: frozenset[str]
    makes: str | None


@dataclasses.dataclass(frozen=True)
class Program:
    """What Inductor wrote for one direction.

    Attributes:
        direction: "forward" or "backward".
        source: the Python program.
        kernels: name -> the source of the Triton kernel.
        steps: in the order of the program.
        collectives: in the order of the graph, with the bytes that they put on the wire, all ranks together.
        memory_bytes: what its kernels and library calls read and write, as Inductor counts it.
        synchronisations: calls in it that make the host wait for the device.
        no_cuda_graph: why Inductor would not capture it in a CUDA graph; None if it would.
        cpu_tensors: how many inputs and outputs are on the CPU.
    """

    direction: str
    source: str
    kernels: dict[str, str]
    steps: tuple[Step, ...]
    collectives: tuple[Traffic, ...]
    memory_bytes: int
    synchronisations: tuple[str, ...]
    no_cuda_graph: str | None
    cpu_tensors: int

    def of(self, kind: str) -> tuple[str, ...]:
        """The names of the steps of a kind, in order."""
        return tuple(step.name for step in self.steps if step.kind == kind)

    def early_waits(self) -> tuple[str, ...]:
        """For each wait behind which the device could have worked on: what stands between it and the first use.

        Only what could run before the wait counts: it reads nothing that the collective has brought.
        """
        found = []
        for place, step in enumerate(self.steps):
            if step.kind == "wait":
                for later in self.steps[place + 1 :]:
                    if later.kind != "wait" and later.reads & step.reads:
                        break
                    if later.kind in ("kernel", "library"):
                        found.append(f"{later.name} after the wait for {', '.join(sorted(step.reads))}")
        return tuple(found)


def collectives_of(graph_module: fx.GraphModule) -> tuple[tuple[str, int], ...]:
    """Kind, and bytes as `passes.traffic` wants them, of each collective of a graph."""
    found = []
    for node in graph_module.graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        kind = _KINDS.get(getattr(packet, "__name__", ""))
        if kind is not None and node.target.namespace == "_c10d_functional":
            ends = [value.meta["val"] for value in (node.args[0], node)]
            taken, given = (int(value.numel()) * value.dtype.itemsize for value in ends)
            # Of an exchange of columns one end is equal on all ranks; the other is largest on the first.
            found.append((kind, min(taken, given) if kind == "all_to_all" else taken))
    return tuple(found)


def read_program(
    written: tuple[str, int],
    collectives: tuple[tuple[str, int], ...],
    graph_module: fx.GraphModule,
    output: Any,
    is_backward: bool,
) -> Program:
    """What Inductor wrote for one direction.

    Args:
        written: the source, and the bytes that Inductor counts.
        collectives: of `collectives_of`.
        graph_module: what was compiled.
        output: what `compile_fx_inner` returned.
        is_backward: True for the backward.
    """
    source, memory_bytes = written
    tree = ast.parse(source)
    calls = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call")
    kernels = dict(_kernels(tree))
    steps = tuple(_steps(calls))
    direction = BACKWARD if is_backward else FORWARD
    info = output.cudagraph_info
    reasons = [output.disabled_cudagraphs_reason, *(() if info is None else info.cudagraph_fail_reasons)]
    return Program(
        direction=direction,
        source=source,
        kernels=kernels,
        steps=steps,
        collectives=tuple(traffic(kind, direction, sympy.Integer(nbytes)) for kind, nbytes in collectives),
        memory_bytes=memory_bytes,
        synchronisations=host_waits(calls),
        no_cuda_graph=next((reason for reason in reasons if reason), None),
        cpu_tensors=_cpu_tensors(graph_module),
    )


def host_waits(function: ast.FunctionDef) -> tuple[str, ...]:
    """The calls that make the host wait for the device."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return tuple(ast.unparse(call) for call in calls if set(ast.unparse(call.func).split(".")) & set(_SYNCHRONISING))


def _kernels(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and source of each Triton kernel."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton":
            name, body = node.args[0], node.args[1]
            assert isinstance(name, ast.Constant) and isinstance(body, ast.Constant)
            yield str(name.value), str(body.value)


def _steps(function: ast.FunctionDef) -> Iterator[Step]:
    for node in _in_order(function):
        name, call = (None, node.value) if isinstance(node, ast.Expr) else (ast.unparse(node.targets[0]), node.value)
        if not isinstance(call, ast.Call):
            continue
        kind, called = _classified(ast.unparse(call.func))
        if kind is not None:
            arguments_of = [*call.args, *(keyword.value for keyword in call.keywords)]
            names = {n.id for a in arguments_of for n in ast.walk(a) if isinstance(n, ast.Name)}
            yield Step(kind, called, frozenset(n for n in names if n != "raw_stream0"), name)


def _in_order(function: ast.FunctionDef) -> list[Any]:
    found = [node for node in ast.walk(function) if isinstance(node, (ast.Expr, ast.Assign))]
    return sorted(found, key=lambda node: node.lineno)


def _classified(function: str) -> tuple[str | None, str]:
    if function.endswith(".run"):
        return "kernel", function.removesuffix(".run")
    if function.startswith("torch.ops._c10d_functional."):
        name = function.split(".")[3].removesuffix("_")
        return ("wait", name) if name == "wait_tensor" else ("collective", _KINDS.get(name, name))
    if function.endswith(".copy_"):
        return "copy", "copy_"
    if function.startswith("extern_kernels."):
        return "library", function.removeprefix("extern_kernels.")
    if function.startswith("torch.ops.") or function.startswith("aten."):
        return "library", ".".join(function.removeprefix("torch.ops.").split(".")[:2])
    return None, ""


def _cpu_tensors(graph_module: fx.GraphModule) -> int:
    """How many values of the graph are tensors on the CPU."""
    values = [node.meta.get("val") for node in graph_module.graph.nodes]
    return sum(isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in pytree.tree_leaves(values))


def cubin(kernel: str, arch: str) -> bytes:
    """The machine code of a Triton kernel that Inductor wrote.

    Args:
        kernel: its source.
        arch: "sm_80" or "sm_90".
    """
    import triton
    from triton.compiler import ASTSource

    (name,) = re.findall(r"^def (triton_\w+)\(", kernel, re.MULTILINE)
    body = kernel.replace("triton_helpers.set_driver_to_gpu()", "")
    with tempfile.TemporaryDirectory() as folder, pretend_gpu(arch, lambda lowering: None):
        path = Path(folder) / f"{name}.py"  # Triton reads a kernel's source from its file
        path.write_text(body, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tuner = getattr(module, name)
        config = tuner.configs[0]
        meta = tuner._create_compile_meta(config)
        source = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
        target = triton.runtime.driver.active.get_current_target()
        code = triton.compile(source, target=target, options=tuner._create_compile_options(config, meta))
        machine_code: bytes = code.asm["cubin"]
        return machine_code
