"""Lets Dynamo, AOTAutograd, Inductor and Triton compile for an NVIDIA GPU where there is none.

All that has to be patched for it stands here, and only for the duration of `pretend_gpu`. What is asked of a GPU while
compiling is answered from a table; nothing runs.

A CPU build of torch has no device guard for CUDA, and autograd, also that of a trace, asks for one with each tensor.
So the fake tensors say "cuda" to Python and are meta tensors to C++. What C++ makes beside them (the 0 of a relu's
gradient) it makes on the meta device; it is moved before Inductor sees it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from passes.errors import AutoshardError, describe

DEVICE = torch.device("cuda", 0)


class NoGpuCompiler(AutoshardError):
    """This installation cannot compile for a GPU without one."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What Inductor asks of a GPU.

    Attributes:
        name: of a GPU of this architecture.
        capability: major and minor number of the compute capability.
        multiprocessors: of it.
        shared_memory: bytes per block.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int


GPUS = {
    "sm_80": Gpu("NVIDIA A100", (8, 0), 108, 166912),
    "sm_90": Gpu("NVIDIA H100", (9, 0), 132, 232448),
}
_REGISTERS, _THREADS, _BLOCK, _WARP = 65536, 2048, 1024, 32


def gpu_of(arch: str) -> Gpu:
    """The GPU of an architecture.

    Raises:
        NoGpuCompiler: if there is none in the table, or Triton is not installed.
    """
    if arch not in GPUS:
        raise NoGpuCompiler(
            describe("--arch", f"got {arch!r}", f"one of {', '.join(GPUS)}", "Choose one of these, or add one to GPUS.")
        )
    if importlib.util.find_spec("triton") is None:
        raise NoGpuCompiler(
            describe(
                "compile",
                "Triton is not installed",
                "the compiler that Inductor uses for GPUs",
                "Install it: `pip install triton` (Linux; it needs no GPU).",
            )
        )
    return GPUS[arch]


@contextlib.contextmanager
def pretend_gpu(arch: str, on_program: Callable[[Any], Any]) -> Iterator[None]:
    """Within, torch compiles for a GPU of this architecture.

    Args:
        arch: "sm_80" or "sm_90".
        on_program: gets each `GraphLowering` in place of a module being loaded from its code, which only a GPU could
            run; returns what stands for that module.

    Raises:
        NoGpuCompiler: if Triton is not installed, or this torch has no such name as must be patched.
    """
    gpu = gpu_of(arch)
    with contextlib.ExitStack() as stack:
        for place, name, value in _patches(gpu, on_program):
            target = _resolve(place)
            if not hasattr(target, name):
                raise _missing(f"{place}.{name}")
            stack.enter_context(mock.patch.object(target, name, value))
        for kind in ("cpu", "cuda", "meta"):
            stack.enter_context(mock.patch.object(FakeTensor, f"is_{kind}", _is_on(kind), create=True))
        inductor, functorch = _resolve("torch._inductor.config"), _resolve("torch._functorch.config")
        # Padding of matrices is decided by running them. No cache may hold a program for a GPU that is none.
        stack.enter_context(inductor.patch(compile_threads=1, shape_padding=False, fx_graph_cache=False))
        stack.enter_context(functorch.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True))
        yield


def _missing(name: str) -> NoGpuCompiler:
    return NoGpuCompiler(
        describe(
            "compile",
            f"torch {torch.__version__} has no {name}",
            "a torch whose compiler can be told of a GPU that is not there",
            "Use torch 2.13.0, or mend autoshard/pretend_gpu.py.",
        )
    )


def _resolve(place: str) -> Any:
    """The module, or the attribute of a module, of this name."""
    module, _, rest = place.partition(":")
    try:
        found = importlib.import_module(module)
        for part in filter(None, rest.split(".")):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise _missing(place) from error
    return found


def _patches(gpu: Gpu, on_program: Callable[[Any], Any]) -> list[tuple[str, str, Any]]:
    """(module or module:attribute, name in it, what stands there meanwhile)."""
    major, minor = gpu.capability
    asked = types.SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        multi_processor_count=gpu.multiprocessors,
        regs_per_multiprocessor=_REGISTERS,
        max_threads_per_multi_processor=_THREADS,
        max_threads_per_block=_BLOCK,
        warp_size=_WARP,
        shared_memory_per_block_optin=gpu.shared_memory,
        gcnArchName="",  # of AMD
    )
    properties = _resolve("torch._inductor.runtime.hints:DeviceProperties")(
        type="cuda",
        index=0,
        multi_processor_count=gpu.multiprocessors,
        cc=10 * major + minor,
        major=major,
        regs_per_multiprocessor=_REGISTERS,
        max_threads_per_multi_processor=_THREADS,
        max_threads_per_block=_BLOCK,
        warp_size=_WARP,
    )
    target = _resolve("triton.backends.compiler:GPUTarget")("cuda", 10 * major + minor, _WARP)
    driver = types.SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_active_torch_device=lambda: DEVICE
    )
    folder = "torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder"
    joint = _resolve("torch._inductor.compile_fx:_recursive_joint_graph_passes")
    return [
        ("torch._inductor.runtime.hints:DeviceProperties", "create", lambda device: properties),
        ("torch.cuda", "get_device_properties", lambda device=None: asked),
        ("torch.cuda", "get_device_capability", lambda device=None: gpu.capability),
        ("torch.cuda", "current_device", lambda: 0),
        ("torch.cuda", "device_count", lambda: 1),
        ("torch._inductor.scheduler", "has_triton", lambda: True),
        ("torch._inductor.compile_fx", "has_triton", lambda: True),
        ("torch.utils._triton", "has_triton", lambda: True),
        ("triton.runtime.driver:driver", "_active", driver),
        ("torch:Tensor", "_make_subclass", _make_fake(torch.Tensor._make_subclass)),
        ("torch._subclasses.fake_tensor:FakeTensor", "__new__", _new_fake(FakeTensor.__new__)),
        (folder, "run", _folding_on_cpu(_resolve(folder).run)),
        ("torch._inductor.compile_fx", "_recursive_joint_graph_passes", _off_meta(joint)),
        ("torch._inductor.graph:GraphLowering", "compile_to_module", on_program),
        ("torch._inductor.output_code:CompiledFxGraph", "post_compile", lambda *args: None),  # there is no module
    ]


def _is_on(kind: str) -> property:
    return property(lambda tensor: tensor.device.type == kind)


def _make_fake(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Fake CUDA tensors tell C++ nothing of CUDA."""

    def make_subclass(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device_for_backend_keys")
        if device is not None and device.type == "cuda":
            kwargs = {"require_grad": kwargs["require_grad"]} if "require_grad" in kwargs else {}
        return make(*args, **kwargs)

    return make_subclass


def _new_fake(new: Callable[..., FakeTensor]) -> Any:
    """What C++ puts on the meta device, as its neighbours seem to be there, is on the GPU."""

    def moved(value: Any) -> Any:
        return DEVICE if isinstance(value, torch.device) and value.type == "meta" else value

    def new_fake(*args: Any, **kwargs: Any) -> FakeTensor:
        return new(*map(moved, args), **{name: moved(value) for name, value in kwargs.items()})

    return staticmethod(new_fake)


def _off_meta(passes: Callable[..., Any]) -> Callable[..., Any]:
    """The same in the text of a graph, before Inductor's first pass."""

    def joint_graph_passes(graph_module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        for node in graph_module.graph.nodes:
            device = node.kwargs.get("device")
            if isinstance(device, torch.device) and device.type == "meta":
                node.update_kwarg("device", DEVICE)
        graph_module.recompile()
        return passes(graph_module, *args, **kwargs)

    return joint_graph_passes


class _OnCpu(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _folding_on_cpu(run: Callable[..., Any]) -> Callable[..., Any]:
    """Constants of one value are computed on the device that they are on, one element each: here on the CPU."""

    def run_on_cpu(folder: Any) -> Any:
        with _OnCpu():  # type: ignore[no-untyped-call]
            return run(folder)

    return run_on_cpu
