"""Measures a `HardwareProfile` on this machine: what collectives, memory and products really take."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autoshard.launch import launch
from autoshard.profile import COLLECTIVES, HardwareProfile, Link
from passes.ops import collectives

_SMALL, _LARGE = 2**6, 2**20  # elements of float32 in a message: what latency takes, what bandwidth does
_LINE = {"cpu": 64, "cuda": 32}


def calibrate(world_size: int, *, backend: str = "gloo", rounds: int = 15, timeout: float = 300.0) -> HardwareProfile:
    """Starts `world_size` processes on this machine and measures them.

    Args:
        world_size: ranks; all of them are taken to be on one node.
        backend: of `torch.distributed`; with "nccl" every rank has its own GPU.
        rounds: of each measurement, of which the lower quartile counts: what the machine does undisturbed.
        timeout: seconds, for all of it.

    Raises:
        AutoshardError: if a rank failed.
    """
    return launch(measure, (backend, rounds), world_size, backend, timeout)[0]  # type: ignore[no-any-return]


def measure(backend: str, rounds: int) -> HardwareProfile:
    """What `calibrate` does on each of its ranks; every rank gets the same profile. Collective over all ranks."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    world = dist.get_world_size()
    links = {name: _link(name, group.group_name, world, device, rounds) for name in COLLECTIVES}
    profile = HardwareProfile(
        name=f"{backend}, {world} ranks, calibrated",
        **links,
        ranks_per_node=max(world, 1),
        network=links["all_to_all"],
        memory_bandwidth=_memory_bandwidth(device, rounds),
        lookup_bandwidth=_lookup_bandwidth(device, rounds),
        line=_LINE[device.type],
        flops=_flops(device, rounds),
        memory=_memory(device, world),
    )
    said = [profile.to_json()]
    dist.broadcast_object_list(said, device=device)
    return HardwareProfile.from_json(said[0])


def _link(name: str, group: str, world: int, device: torch.device, rounds: int) -> Link:
    """Two sizes of message give a line: its start is the latency, its slope the bandwidth."""
    if world == 1:
        return Link(0.0, 1e12)
    small, large = (
        _seconds(_collective(name, group, torch.ones(n, device=device), world), rounds, device)
        for n in (_SMALL, _LARGE)
    )
    sent = {size: _sent(name, 4 * size, world) for size in (_SMALL, _LARGE)}
    slope = max(large - small, 1e-9) / (sent[_LARGE] - sent[_SMALL])
    hops = (world - 1).bit_length()
    return Link(max(small - slope * sent[_SMALL], 0.0) / hops, 1 / slope)


def _sent(name: str, nbytes: int, world: int) -> float:
    """The bytes that leave a rank which puts in `nbytes`."""
    return nbytes * (world - 1) * {"all_gather": 1.0, "all_reduce": 2 / world}.get(name, 1 / world)


def _collective(name: str, group: str, x: Tensor, world: int) -> Callable[[], object]:
    splits = [x.numel() // world] * world
    even = x[: sum(splits)]
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: collectives.all_gather(x, group),
        "all_to_all": lambda: collectives.all_to_all(even, splits, splits, group),
        "reduce_scatter": lambda: collectives.reduce_scatter(even, group),
        "all_reduce": lambda: collectives.all_reduce(x, group),
    }
    return calls[name]


def _memory_bandwidth(device: torch.device, rounds: int) -> float:
    source, target = (torch.ones(2**23, device=device) for _ in range(2))
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), rounds, device)


def _lookup_bandwidth(device: torch.device, rounds: int) -> float:
    """Of bags of four rows of 256 bytes, out of 64 MiB."""
    table = torch.ones(2**18, 64, device=device)
    ids = torch.randint(0, table.size(0), (2**13, 4), generator=torch.Generator().manual_seed(0)).to(device)
    taken = _seconds(lambda: F.embedding_bag(ids, table, mode="sum"), rounds, device)
    return ids.numel() * table.size(1) * table.element_size() / taken


def _flops(device: torch.device, rounds: int) -> float:
    x, weight = (torch.ones(512, 512, device=device) for _ in range(2))
    return 2 * 512**3 / _seconds(lambda: F.linear(x, weight), rounds, device)


def _memory(device: torch.device, world: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / world


def _seconds(call: Callable[[], object], rounds: int, device: torch.device) -> float:
    """The lower quartile over the rounds of the slowest rank's time: every round begins on all ranks together."""
    times = []
    with torch.no_grad():
        for number in range(rounds + 2):
            dist.barrier()
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken = torch.tensor([time.perf_counter() - start], device=device)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= 2:
                times.append(float(taken))
    return statistics.quantiles(times, n=4)[0]
