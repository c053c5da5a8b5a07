"""Models on the meta device get their values shard by shard: no rank ever holds a whole table.

Values come from each module's own `reset_parameters`, run on the sharded parameters. Shards draw from a random stream
of their rank, so that no two ranks have equal columns; replicated parameters are those of the first rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard import torchrec_modules
from passes.errors import CaptureError, describe


def uninitialised(model: nn.Module) -> list[nn.Module]:
    """The modules that have parameters or buffers of their own on the meta device."""
    return [module for module in model.modules() if any(tensor.is_meta for tensor in _own(module))]


def check_initialisable(model: nn.Module) -> None:
    """Every module with parameters or buffers on the meta device can initialise them.

    Raises:
        CaptureError: otherwise, with the module's path.
    """
    for path, module in model.named_modules():
        if any(tensor.is_meta for tensor in _own(module)) and not hasattr(module, "reset_parameters"):
            raise CaptureError(
                describe(
                    path or "the model",
                    f"{type(module).__name__} has tensors on the meta device and no reset_parameters()",
                    "a module that can initialise itself",
                    "Give it a reset_parameters() method, or its own tensors a real device.",
                )
            )


def initialise(model: nn.Module, modules: list[nn.Module], mesh: DeviceMesh) -> None:
    """Gives modules their initial values. Collective over the mesh.

    Args:
        model: the model that they are modules of.
        modules: their parameters are shards with storage; buffers may be on the meta device still.
        mesh: 1-D.
    """
    if not modules:
        return
    group = mesh.get_group()
    seed = torch.tensor([torch.initial_seed() % 2**62], device=mesh.device_type)
    dist.broadcast(seed, src=dist.get_global_rank(group, 0), group=group)
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=mesh.device_type)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(int(seed) + mesh.get_local_rank())
        for module in modules:
            module.reset_parameters()  # type: ignore[operator]  # `check_initialisable` has seen it
        torchrec_modules.reset_tables(model, modules)
    for module in modules:
        for tensor in _own(module):
            _broadcast_if_replicated(tensor, mesh)


def _own(module: nn.Module) -> tuple[Tensor, ...]:
    return (*module.parameters(recurse=False), *module.buffers(recurse=False))


def _broadcast_if_replicated(tensor: Tensor, mesh: DeviceMesh) -> None:
    if isinstance(tensor, DTensor):
        if not isinstance(tensor.placements[0], Replicate):
            return
        tensor = tensor.to_local()
    group = mesh.get_group()
    dist.broadcast(tensor.detach(), src=dist.get_global_rank(group, 0), group=group)
