"""Parameters become DTensors, and modules learn to use them. The only room that changes a model.

Every parameter becomes a DTensor under its own name: Shard(feature axis) where the plan shards it, Replicate
elsewhere. Who reads a parameter gets what it can use:

    a traced graph             the DTensor; the graph's own nodes make a plain tensor of it
    a module's own forward     a plain tensor, whose gradient is reduced over the ranks (`replicate_parameter`)
    everybody else             the DTensor: optimizers, state_dict, checkpoints, initialisation

The second row works through a twin: an object that shares the module's `__dict__`, of a class in which each parameter
is a property. The module's forward runs with the twin as its `self`. What it writes, it writes into the module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from passes.errors import ConsumedError, describe
from passes.layout import chunk_offset, chunk_sizes
from passes.ops.redistribute import replicate_parameter
from passes.plan import COLWISE, ShardingPlan

_TWIN = "_autoshard_twin"
_ORIGINAL = "_autoshard_original"


class ConsumedParameter(nn.Parameter):
    """What the parameters of before `autoshard()` turn into: whoever still holds one is told so at the first use."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ConsumedError(
            describe(
                "a parameter from before autoshard()",
                f"it was used ({getattr(func, '__name__', func)}) after autoshard() had sharded it",
                "the parameters that the model has now",
                "Build optimizers, and take parameters out of the model, after autoshard().",
            )
        )


def shard_parameters(model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh) -> None:
    """Turns every parameter of the model into a DTensor, in place. Ties stay ties.

    Args:
        model: its parameters are whole, and equal on all ranks, or on the meta device.
        plan: which are sharded, and along which dimension.
        mesh: 1-D, in the order of its process group.
    """
    dims = {row.parameter: row.dim for row in plan.rows if row.strategy == COLWISE}
    made: dict[int, nn.Parameter] = {}
    consumed: list[nn.Parameter] = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) in {id(p) for p in made.values()}:
                continue
            if id(parameter) not in made:
                full_name = f"{path}.{name}" if path else name
                made[id(parameter)] = _distribute(parameter, dims.get(full_name), mesh)
                consumed.append(parameter)
            module._parameters[name] = made[id(parameter)]
    for parameter in consumed:
        parameter.data = parameter.new_empty(0)
        parameter.__class__ = ConsumedParameter


def _distribute(parameter: nn.Parameter, dim: int | None, mesh: DeviceMesh) -> nn.Parameter:
    """One parameter as a DTensor parameter; `dim` is None for a replicated one."""
    whole = parameter.detach()
    if dim is None:
        local: Tensor = whole
        placement: Placement = Replicate()
    else:
        world, rank = mesh.size(), mesh.get_local_rank()
        length = whole.size(dim)
        local = whole.narrow(dim, chunk_offset(length, world, rank), chunk_sizes(length, world)[rank])
        placement = Shard(dim)
    if whole.is_meta:
        local = torch.empty_like(local, device=mesh.device_type, memory_format=torch.contiguous_format)
    else:
        # A copy: a view of the whole would keep the whole alive.
        local = local.to(mesh.device_type).clone(memory_format=torch.contiguous_format)
    tensor = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=whole.shape, stride=_contiguous_stride(whole.shape)
    )
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def _contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(list(shape)[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))[: len(list(shape))]


def use_graph(module: nn.Module, graphs: Mapping[bool | None, fx.GraphModule]) -> None:
    """Gives a module the forward of its rewritten graph.

    Args:
        module: stays the object that it is; its class becomes a subclass of its class.
        graphs: mode (`training`) -> graph; the key None for a graph that is for both.
    """
    original = type(module)
    forwards = {mode: type(graph).forward for mode, graph in graphs.items()}
    namespace: dict[str, Any] = {}
    for graph in graphs.values():
        _adopt_attributes(module, graph)
        # torch.export's code takes its arguments apart, and puts its result together, by these.
        namespace |= {name: vars(graph)[name] for name in ("_in_spec", "_out_spec") if name in vars(graph)}
    if None in forwards:
        forward = forwards[None]
    else:

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forwards[self.training](self, *args, **kwargs)

    _swap_class(module, {"forward": functools.wraps(original.forward)(_method(forward)), **namespace})


def _adopt_attributes(module: nn.Module, graph: nn.Module) -> None:
    """Gives a module what its graph has of its own: lifted constants and nested graphs."""
    for name, buffer in graph._buffers.items():
        if not hasattr(module, name):
            module.register_buffer(name, buffer, persistent=False)
    for name, child in graph._modules.items():
        if not hasattr(module, name):
            module.__dict__[name] = child


def _method(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own around `forward`, whose metadata may be set."""

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return method


def use_local_parameters(module: nn.Module, group: str, reduction: str) -> None:
    """Lets a module's own forward see its replicated parameters as plain tensors."""
    original = type(module)
    reads = {name: _local_property(name, group, reduction) for name in module._parameters}
    if original.forward is nn.Module.forward or isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        _swap_class(module, reads)  # no forward of its own: others read its parameters
        return

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original.forward(self.__dict__[_TWIN], *args, **kwargs)

    twin_class = _subclass(original, reads)
    twin = object.__new__(twin_class)
    object.__setattr__(twin, "__dict__", module.__dict__)
    module.__dict__[_TWIN] = twin
    _swap_class(module, {"forward": forward})


def expose_parameters(module: nn.Module, group: str, reduction: str) -> None:
    """Lets everybody see a module's replicated parameters as plain tensors: another module's code reads them."""
    _swap_class(module, {name: _local_property(name, group, reduction) for name in module._parameters})


def _local_property(name: str, group: str, reduction: str) -> property:
    def read(self: nn.Module) -> Tensor | None:
        parameter = self._parameters[name]
        return None if parameter is None else replicate_parameter(parameter, group, reduction)

    return property(read)


def _swap_class(module: nn.Module, namespace: dict[str, Any]) -> None:
    module.__class__ = _subclass(type(module), {**namespace, _ORIGINAL: original_class(module)})


def _subclass(cls: type[nn.Module], namespace: dict[str, Any]) -> type[nn.Module]:
    """A subclass that goes by the name of its base."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, **namespace})


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before `autoshard()`."""
    cls: type[nn.Module] = getattr(type(module), _ORIGINAL, type(module))
    return cls


def restore(module: nn.Module) -> None:
    """Gives a module its own class and forward back."""
    module.__dict__.pop(_TWIN, None)
    module.__class__ = original_class(module)


def gather_parameters(model: nn.Module) -> None:
    """Turns every DTensor parameter back into a whole, plain one, in place. Collective over the mesh."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, DTensor):
                if id(parameter) not in made:
                    whole = parameter.detach().full_tensor().clone()
                    made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
