"""Parameters become shards.

Every parameter becomes a DTensor under its own name: Shard(feature axis) where the plan shards it, Replicate
elsewhere. So optimizers, `clip_grad_norm_`, state_dict and torch.distributed.checkpoint are right without code of ours.

One exception: DTensor carries no sparse gradient. The table of a lookup with sparse=True is a plain parameter that
holds this rank's columns, so that SparseAdam, SGD and Adagrad work on it; `state_dict` shows it as a DTensor, and
`load_state_dict` takes a DTensor or the whole table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autoshard.materialize import initialise, uninitialised
from autoshard.mesh import is_of_owners
from passes.errors import ConsumedError, describe
from passes.layout import chunk_offset, chunk_sizes
from passes.plan import REPLICATE, PlanRow, ShardingPlan

_LOCAL = "_autoshard_local_parameters"


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


@dataclasses.dataclass(frozen=True)
class Shape:
    """The whole of which a plain local parameter is a part.

    Attributes:
        mesh: the ranks.
        placement: Shard or Replicate.
        shape: of the whole.
    """

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size

    def wrap(self, local: Tensor) -> DTensor:
        """The DTensor with this rank's part."""
        stride = _contiguous_stride(self.shape)
        return DTensor.from_local(local, self.mesh, [self.placement], run_check=False, shape=self.shape, stride=stride)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, a view."""
        if not isinstance(self.placement, Shard):
            return whole
        dim = self.placement.dim
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            return whole.narrow(dim, 0, 0)
        world, (rank,) = self.mesh.size(), coordinate
        length = self.shape[dim]
        return whole.narrow(dim, chunk_offset(length, world, rank), chunk_sizes(length, world)[rank])


def shard_parameters(
    model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, owners: Mapping[tuple[int, ...], DeviceMesh]
) -> None:
    """Turns every parameter of the model into a shard, in place. Ties stay ties.

    Args:
        model: its parameters are whole, and equal on all ranks, or on the meta device.
        plan: which are sharded, and along which dimension.
        mesh: 1-D, in the order of its process group.
        owners: the meshes of tables that are on some of the ranks.
    """
    sharded = {row.parameter: row for row in plan.rows if row.strategy != REPLICATE}
    sparse = {row.parameter for row in plan.rows if row.sparse_gradient}
    fresh = uninitialised(model)
    names: dict[int, str] = {}
    made: dict[int, nn.Parameter] = {}
    consumed: list[nn.Parameter] = []
    modules = list(model.named_modules())
    for path, module in modules:
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            first = names.setdefault(id(parameter), f"{path}.{name}" if path else name)
            shape = _shape_of(parameter, sharded.get(first), mesh, owners)
            if id(parameter) not in made:
                made[id(parameter)] = _shard(parameter, shape, as_dtensor=first not in sparse)
                consumed.append(parameter)
            module._parameters[name] = made[id(parameter)]
            if first in sparse:
                _keep_local(module, name, shape)
    initialise(model, fresh, mesh)
    for parameter in consumed:
        parameter.data = parameter.new_empty(0)
        parameter.__class__ = ConsumedParameter
    _update_references(modules, dict(zip(map(id, consumed), made.values(), strict=True)))


def _shape_of(
    parameter: nn.Parameter, row: PlanRow | None, mesh: DeviceMesh, owners: Mapping[tuple[int, ...], DeviceMesh]
) -> Shape:
    if row is None or row.dim is None:
        return Shape(mesh, Replicate(), parameter.shape)
    return Shape(mesh if row.ranks is None else owners[row.ranks], Shard(row.dim), parameter.shape)


def _shard(parameter: nn.Parameter, shape: Shape, as_dtensor: bool) -> nn.Parameter:
    whole = parameter.detach()
    local = shape.part(whole)
    device = shape.mesh.device_type
    if whole.is_meta:
        local = torch.empty_like(local, device=device, memory_format=torch.contiguous_format)
    else:
        # A copy: a view of the whole would keep the whole alive.
        local = local.to(device).clone(memory_format=torch.contiguous_format)
    tensor = shape.wrap(local) if as_dtensor else local
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def _contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    sizes, strides = list(shape), [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))[: len(sizes)]


def _update_references(modules: list[tuple[str, nn.Module]], new: Mapping[int, nn.Parameter]) -> None:
    """Puts the new parameters in the lists, tuples and dicts that modules keep of their parameters."""
    for _, module in modules:
        for name, value in list(module.__dict__.items()):
            if name not in ("_parameters", "_buffers", "_modules") and isinstance(
                value, (list, tuple, dict, nn.Parameter)
            ):
                module.__dict__[name] = _replaced(value, new)


def _replaced(value: Any, new: Mapping[int, nn.Parameter]) -> Any:
    if isinstance(value, nn.Parameter):
        return new.get(id(value), value)
    if isinstance(value, list):
        value[:] = [_replaced(item, new) for item in value]
        return value
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _replaced(item, new)
        return value
    if type(value) is tuple:
        items = [_replaced(item, new) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else tuple(items)
    return value


def _keep_local(module: nn.Module, name: str, shape: Shape) -> None:
    """Lets a plain local parameter be a DTensor in state dicts."""
    shapes: dict[str, Shape] = module.__dict__.setdefault(_LOCAL, {})
    if not shapes:
        module._register_state_dict_hook(_wrap_in_state_dict)
        module._register_load_state_dict_pre_hook(_unwrap_from_state_dict, with_module=True)
    shapes[name] = shape


def _wrap_in_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, shape in module.__dict__[_LOCAL].items():
        local = state.get(prefix + name)
        if local is not None and not isinstance(local, DTensor):
            state[prefix + name] = shape.wrap(local.detach())


def _unwrap_from_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, shape in module.__dict__[_LOCAL].items():
        value = state.get(prefix + name)
        if isinstance(value, DTensor):
            state[prefix + name] = value.to_local()
        elif isinstance(value, Tensor) and value.shape == shape.shape:
            state[prefix + name] = shape.part(value)


def local_shapes(model: nn.Module) -> dict[str, Shape]:
    """Name -> the whole behind it, for the parameters that are plain tensors of this rank's part."""
    return {
        f"{path}.{name}" if path else name: shape
        for path, module in model.named_modules()
        for name, shape in module.__dict__.get(_LOCAL, {}).items()
    }


def whole(value: Tensor, shape: Shape | None, mesh: DeviceMesh | None = None) -> Tensor:
    """The whole of a parameter or gradient, dense, on every rank. Collective over the model's mesh.

    Args:
        value: a DTensor, or a plain tensor of this rank's part.
        shape: of the plain tensor; None for a DTensor or a tensor that is whole.
        mesh: the model's. Needed where a table is on some of the ranks.
    """
    value = value.detach()
    if not isinstance(value, DTensor):
        dense = value.to_dense() if value.is_sparse else value
        if shape is None:
            return dense
        value = shape.wrap(dense)
    if not is_of_owners(value.device_mesh):
        return value.full_tensor()
    assert mesh is not None
    return _from_owners(value, mesh)


def whole_gradient(parameter: Tensor, shape: Shape | None, mesh: DeviceMesh | None = None) -> Tensor | None:
    """`whole` of the parameter's gradient; None if it has none on any rank."""
    gradient, of = parameter.grad, parameter.device_mesh if isinstance(parameter, DTensor) else None
    if shape is not None:
        of = shape.mesh
    if of is not None and is_of_owners(of):
        assert mesh is not None
        has_one = torch.tensor([gradient is not None], dtype=torch.int32, device=mesh.device_type)
        dist.broadcast(has_one, src=int(of.mesh[0]), group=mesh.get_group())
        if bool(has_one) and gradient is None:
            gradient = torch.zeros_like(parameter)
    return None if gradient is None else whole(gradient, shape, mesh)


def _from_owners(value: DTensor, mesh: DeviceMesh) -> Tensor:
    """The columns of a table from each of the ranks that it is on."""
    (placement,), of = value.placements, value.device_mesh
    assert isinstance(placement, Shard)
    local, coordinate, pieces = value.to_local(), of.get_coordinate(), []
    for place, size in enumerate(chunk_sizes(value.size(placement.dim), of.size())):
        shape = [size if dim == placement.dim else length for dim, length in enumerate(value.shape)]
        piece = local.contiguous() if coordinate is not None and coordinate[0] == place else local.new_empty(shape)
        dist.broadcast(piece, src=int(of.mesh[place]), group=mesh.get_group())
        pieces.append(piece)
    return torch.cat(pieces, placement.dim)


def gather_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Turns every parameter back into a whole, plain one, in place. Collective over the mesh."""
    shapes = local_shapes(model)
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                shape = shapes.get(f"{path}.{name}" if path else name)
                made[id(parameter)] = nn.Parameter(
                    whole(parameter, shape, mesh).clone(), requires_grad=parameter.requires_grad
                )
            module._parameters[name] = made[id(parameter)]
        if module.__dict__.pop(_LOCAL, None) is not None:
            _remove_hooks(module)


def _remove_hooks(module: nn.Module) -> None:
    for hooks, ours in (
        (module._state_dict_hooks, _wrap_in_state_dict),
        (module._load_state_dict_pre_hooks, _unwrap_from_state_dict),
    ):
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is ours]:
            del hooks[key]
