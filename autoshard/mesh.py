"""The mesh that a model is sharded over."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from passes.errors import MeshError, describe
from passes.ops.collectives import can_order_groups, ordered_group
from passes.plan import ShardingPlan

OWNERS = ("owners",)


def resolve_mesh(mesh: DeviceMesh | None, model: nn.Module) -> DeviceMesh:
    """The mesh to use: checked, and in the order of its process group.

    Args:
        mesh: 1-D, this rank in it; None for all ranks of the default process group.
        model: decides the device type of a default mesh.

    Raises:
        MeshError: if it cannot be sharded over.
    """
    if mesh is None:
        return _default_mesh(model)
    if mesh.ndim != 1:
        raise MeshError(
            describe(
                "mesh",
                f"it has {mesh.ndim} dimensions",
                "a 1-D mesh",
                'Pass one dimension of it, such as mesh["tp"].',
            )
        )
    if mesh.get_coordinate() is None:
        raise MeshError(
            describe(
                "mesh",
                f"rank {dist.get_rank()} is not one of its ranks {mesh.mesh.tolist()}",
                "a call of autoshard() on the ranks of the mesh only",
                "Call autoshard() only where mesh.get_coordinate() is not None.",
            )
        )
    return _in_group_order(mesh)


def owner_meshes(mesh: DeviceMesh, plan: ShardingPlan) -> dict[tuple[int, ...], DeviceMesh]:
    """For tables whose columns are on some of the ranks: these, as places in the mesh -> a mesh of them.

    Such a mesh has a process group, for DTensor's own `full_tensor()`, only if the model is sharded over all processes
    in ascending order, as every process takes part in making one. Nothing else needs it: optimizers and checkpoints do
    not communicate, and what a step exchanges goes through the group of the model's mesh. Collective over that mesh.
    """
    wanted = dict.fromkeys(row.ranks for row in plan.rows if row.ranks is not None)
    ranks = mesh.mesh.flatten().tolist()
    whole_world = ranks == list(range(dist.get_world_size()))
    meshes = {}
    for chosen in wanted:
        places = [ranks[place] for place in chosen]
        meshes[chosen] = DeviceMesh(mesh.device_type, places, mesh_dim_names=OWNERS, _init_backend=whole_world)
        if not whole_world:
            meshes[chosen]._dim_group_names = []  # what a mesh has on ranks outside of it; Dynamo asks for it
    return meshes


def is_of_owners(mesh: DeviceMesh) -> bool:
    """True for a mesh that `owner_meshes` made."""
    return mesh.mesh_dim_names == OWNERS


def _default_mesh(model: nn.Module) -> DeviceMesh:
    if not dist.is_initialized():
        raise MeshError(
            describe(
                "autoshard()",
                "there is no process group",
                "an initialized torch.distributed",
                "Call torch.distributed.init_process_group() first, and start the program with torchrun.",
            )
        )
    on_accelerator = any(p.device.type not in ("cpu", "meta") for p in model.parameters())
    cpu_possible = "cpu" in dist.get_backend_config()
    device_type = "cpu"
    if torch.accelerator.is_available() and (on_accelerator or not cpu_possible):
        accelerator = torch.accelerator.current_accelerator()
        device_type = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _in_group_order(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh itself, or one like it whose process group has its ranks in the order of the mesh.

    `DeviceMesh(device, [2, 3, 0, 1])` gives its group the ranks in ascending order, and collectives follow the group.
    """
    ranks = mesh.mesh.flatten().tolist()
    if ranks == dist.get_process_group_ranks(mesh.get_group()):
        return mesh
    if not can_order_groups():
        raise MeshError(
            describe(
                "mesh",
                f"its ranks {ranks} are not ascending, and torch {torch.__version__} makes no process group of another "
                "order",
                "ascending ranks",
                "Give the mesh its ranks in ascending order, or install torch 2.13 or newer.",
            )
        )
    if len(ranks) != dist.get_world_size():
        raise MeshError(
            describe(
                "mesh",
                f"its ranks {ranks} are not in the order of its process group, which is ascending",
                "a mesh whose process group has its order",
                "Make the group with new_group(ranks, sort_ranks=False) on all ranks, and the mesh with "
                "DeviceMesh.from_group(group, device_type).",
            )
        )
    return DeviceMesh.from_group(ordered_group(ranks), mesh.device_type)
