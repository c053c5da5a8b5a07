"""A process group that counts what it sends, for tests of the number of collectives and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

# The collectives of ProcessGroup: what each is, and which argument holds its inputs. Torch's
# functional operators, eager or compiled, look an override up by these names. Some of them changed
# between versions.
_COLLECTIVES = {
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
}


@dataclass(frozen=True)
class Call:
    """One collective, or one coalesced collective, of this rank.

    bytes_sent: what leaves this rank for the others. With W ranks and an input of n bytes:
        all_gather n*(W-1), reduce_scatter n*(W-1)/W, all_reduce 2*n*(W-1)/W (a ring),
        all_to_all the splits for the other ranks; from the source alone, broadcast n*(W-1) and
        scatter the others' parts; from all but the destination, gather n and reduce n.
    dtype: of the first input.
    numel_in: of all inputs together.
    """

    kind: str
    bytes_sent: float
    dtype: torch.dtype | None
    numel_in: int


class CountingProcessGroup(dist.ProcessGroup):
    """Forwards every collective to `inner` and, within `counting`, records it."""

    def __init__(self, inner: dist.ProcessGroup, name: str) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self._own_name = name
        self._calls: list[Call] | None = None
        # Through the backend works what is not forwarded: barrier, send, recv.
        cpu = torch.device("cpu")
        self._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, inner._get_backend(cpu))

    @property
    def group_name(self) -> c10d.GroupName:
        """Not the backend's name, which is that of `inner`."""
        return c10d.GroupName(self._own_name)

    @contextmanager
    def counting(self) -> Iterator[list[Call]]:
        """The calls made within, in order."""
        if self._calls is not None:
            raise RuntimeError("this group is counting already")
        calls: list[Call] = []
        self._calls = calls
        try:
            yield calls
        finally:
            self._calls = None

    def _record(self, kind: str, inputs: Any, arguments: tuple[Any, ...]) -> None:
        if self._calls is None:
            return
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        self._calls.append(
            Call(
                kind=kind,
                bytes_sent=self._bytes_sent(kind, tensors, arguments),
                dtype=tensors[0].dtype if tensors else None,
                numel_in=sum(tensor.numel() for tensor in tensors),
            )
        )

    def _bytes_sent(self, kind: str, inputs: list[Tensor], arguments: tuple[Any, ...]) -> float:
        world, rank = self.size(), self.rank()
        total = sum(tensor.nbytes for tensor in inputs)
        if kind == "all_gather":
            return total * (world - 1)
        if kind == "reduce_scatter":
            return total * (world - 1) / world
        if kind == "all_reduce":
            return 2 * total * (world - 1) / world
        if kind == "all_to_all":
            return total - self._kept(inputs, arguments)
        is_root = arguments[-1].rootRank == rank
        if kind == "broadcast":
            return total * (world - 1) if is_root else 0
        if kind == "scatter":
            return total - inputs[rank].nbytes if is_root else 0
        return 0 if is_root else total

    def _kept(self, inputs: list[Tensor], arguments: tuple[Any, ...]) -> float:
        """The bytes of an all_to_all that are for this rank itself."""
        if isinstance(arguments[1], list):  # of alltoall: a tensor for each rank
            return inputs[self.rank()].nbytes
        splits: list[int] = arguments[3]
        if not splits:
            return inputs[0].nbytes / self.size()
        return inputs[0].nbytes * splits[self.rank()] / (sum(splits) or 1)


def _forwarding(name: str, kind: str, place: int) -> Callable[..., Any]:
    def collective(self: CountingProcessGroup, *arguments: Any) -> Any:
        self._record(kind, arguments[place], arguments)
        return getattr(self.inner, name)(*arguments)

    collective.__name__ = name
    return collective


for _name, (_kind, _place) in _COLLECTIVES.items():
    setattr(CountingProcessGroup, _name, _forwarding(_name, _kind, _place))


def counting_mesh(mesh: DeviceMesh) -> tuple[DeviceMesh, CountingProcessGroup]:
    """A mesh over the same ranks in the same order, whose collectives are counted.

    Every call gives the same group. The mesh is unequal to `mesh`, so that no cache of DTensor or
    Dynamo takes one for the other.
    """
    inner = mesh.get_group()
    name = f"{inner.group_name}_counting"
    world = c10d._world
    for known in world.pg_names:
        if isinstance(known, CountingProcessGroup) and known.inner is inner:
            group = known
            break
    else:
        group = CountingProcessGroup(inner, name)
        world.pg_map[group] = world.pg_map[inner]
        world.pg_names[group] = c10d.GroupName(name)
        world.pg_backend_config[group] = world.pg_backend_config[inner]
        world.pg_group_ranks[group] = world.pg_group_ranks[inner]
        world.pg_to_tag[group] = f"ptd:{name}"
        c10d._register_process_group(c10d.GroupName(name), group)
    # Meshes are equal by ranks and dimension names, whatever their groups.
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("counting",)), group
