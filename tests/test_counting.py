from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.counting import Call, counting_mesh
from tests.pool import Pool

ops = torch.ops._c10d_functional


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int, group: str) -> Tensor:
        ctx.world, ctx.group = world, group
        return ops.wait_tensor(ops.all_gather_into_tensor(x, world, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        scattered = ops.reduce_scatter_tensor(gradient.contiguous(), "sum", ctx.world, ctx.group)
        return ops.wait_tensor(scattered), None, None


def each_collective(x: Tensor, send: list[int], receive: list[int], group: str) -> list[Tensor]:
    world = len(send)
    wait = ops.wait_tensor
    gathered = wait(ops.all_gather_into_tensor(x, world, group))
    scattered = wait(ops.reduce_scatter_tensor(gathered, "sum", world, group))
    reduced = wait(ops.all_reduce(scattered, "sum", group))
    exchanged = wait(ops.all_to_all_single(reduced, receive, send, group))
    coalesced = ops.all_gather_into_tensor_coalesced([x, reduced], world, group)
    gathered_both = [wait(tensor) for tensor in coalesced]
    coalesced = ops.reduce_scatter_tensor_coalesced(gathered_both, "sum", world, group)
    scattered_both = [wait(tensor) for tensor in coalesced]
    reduced_both = [wait(t) for t in ops.all_reduce_coalesced(scattered_both, "sum", group)]
    return [gathered, scattered, reduced, exchanged, *reduced_both]


def count_each(mesh: DeviceMesh, backend: str | None) -> tuple[list[Call], bool]:
    counted, counter = counting_mesh(mesh)
    place, world = mesh.get_local_rank(), mesh.size()
    # Rank r sends r rows to each other rank and keeps the rest.
    send = [place] * world
    send[place] = 12 - place * (world - 1)
    receive = list(range(world))
    receive[place] = send[place]
    x = torch.arange(36.0).reshape(12, 3) + place
    function = each_collective
    if backend is not None:
        function = torch.compile(each_collective, backend=backend, fullgraph=True)
    with counter.counting() as calls:
        found = function(x, send, receive, counted.get_group().group_name)
    expected = each_collective(x, send, receive, mesh.get_group().group_name)
    return calls, all(map(torch.equal, found, expected))


def count_backward(mesh: DeviceMesh, backend: str) -> tuple[list[Call], list[Call], Tensor]:
    counted, counter = counting_mesh(mesh)
    group = counted.get_group().group_name
    world = mesh.size()

    def loss(x: Tensor) -> Tensor:
        return (Gather.apply(x, world, group) * 3).sum()

    x = torch.ones(2, 5, requires_grad=True)
    function = torch.compile(loss, backend=backend, fullgraph=True)
    with counter.counting() as forward:
        value = function(x)
    with counter.counting() as backward:
        value.backward()
    assert x.grad is not None
    return forward, backward, x.grad


def count_other_interfaces(mesh: DeviceMesh) -> tuple[list[Call], bool]:
    counted, counter = counting_mesh(mesh)
    group = counted.get_group()
    tensor = torch.arange(30.0).reshape(5, 6)
    received = [torch.empty(4, dtype=torch.float64) for _ in range(mesh.size())]
    with counter.counting() as calls:
        dist.all_gather(received, torch.ones(4, dtype=torch.float64), group=group)
        dist.broadcast(received[0], group=group, group_src=0)
        dist.barrier(group=group)
        sharded = distribute_tensor(tensor, counted, [Shard(1)], src_data_rank=None)
        whole = sharded.redistribute(counted, [Replicate()]).to_local()
    return calls, torch.equal(whole, tensor)


def identities(mesh: DeviceMesh) -> tuple[bool, ...]:
    counted, counter = counting_mesh(mesh)
    again, counter_again = counting_mesh(mesh)
    found = dist.distributed_c10d._resolve_process_group(counter.group_name)
    ranks = dist.get_process_group_ranks(counter)
    return (
        found is counter and counted.get_group() is counter,
        again == counted and counter_again is counter,
        counted != mesh,
        ranks == mesh.mesh.tolist() == counted.mesh.tolist(),
        counted.get_local_rank() == mesh.get_local_rank(),
    )


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_each_collective(pool: Pool, backend: str | None) -> None:
    for place, (calls, equal) in enumerate(pool.run(count_each, backend, timeout=100)):
        assert equal
        n = 36 * 4  # the bytes of x and of what each collective makes of it
        assert calls == [
            Call("all_gather", n * 3, torch.float32, 36),
            Call("reduce_scatter", 4 * n * 3 / 4, torch.float32, 4 * 36),
            Call("all_reduce", 2 * n * 3 / 4, torch.float32, 36),
            Call("all_to_all", place * 3 * 3 * 4, torch.float32, 36),
            Call("all_gather", 2 * n * 3, torch.float32, 2 * 36),
            Call("reduce_scatter", 2 * 4 * n * 3 / 4, torch.float32, 2 * 4 * 36),
            Call("all_reduce", 2 * 2 * n * 3 / 4, torch.float32, 2 * 36),
        ]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_forward_and_backward_are_told_apart(pool: Pool, backend: str) -> None:
    for forward, backward, gradient in pool.run(count_backward, backend, world_size=2):
        assert forward == [Call("all_gather", 40, torch.float32, 10)]
        assert backward == [Call("reduce_scatter", 40, torch.float32, 20)]
        assert torch.equal(gradient, torch.full((2, 5), 6.0))


def test_collectives_that_are_not_functional(pool: Pool) -> None:
    for place, (calls, equal) in enumerate(pool.run(count_other_interfaces, ranks=[2, 3, 0, 1])):
        assert equal
        assert calls == [
            Call("all_gather", 4 * 8 * 3, torch.float64, 4),
            Call("broadcast", 4 * 8 * 3 if place == 0 else 0, torch.float64, 4),
            Call("all_gather", 5 * 2 * 4 * 3, torch.float32, 5 * 2),
        ]


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [3, 1]])
def test_counting_mesh(pool: Pool, ranks: list[int]) -> None:
    assert pool.run(identities, ranks=ranks) == [(True,) * 5] * len(ranks)
