"""Interleaved timing on several ranks: every round runs every contender once, so that a disturbance meets all."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

Call = Callable[[], object]
# Runs a call; the milliseconds that it took on this rank.
Clock = Callable[[Call], float]
HEAD_START = 20_000_000  # cycles: about 10 ms of a GPU at 2 GHz


@dataclass(frozen=True)
class Timing:
    """Milliseconds of the slowest rank: the median of all rounds, and the quartiles around it."""

    median: float
    lower: float
    upper: float


def host_time(call: Call) -> float:
    """From the call to its return: for the CPU."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def finished_time(call: Call) -> float:
    """From the call until the GPU, idle before, is idle again: what the host takes to launch the work counts."""

    def and_wait() -> None:
        call()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return host_time(and_wait)


def device_time(call: Call) -> float:
    """The GPU's part alone: it is kept busy until the host has launched all of the work, as in a loop that the host
    runs ahead of. A call that waits for the GPU gets no such head start."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def interleaved(
    contenders: Mapping[str, Call], rounds: int, warmup: int, clock: Clock = host_time, device: str = "cpu"
) -> dict[str, Timing]:
    """Collective. Times every contender `rounds` times, in an order that changes from round to round.

    Args:
        contenders: by name.
        rounds: at least 2.
        warmup: rounds before them that are not counted.
        clock: how a call is timed.
        device: of the tensors that the default process group reduces.
    """
    names = list(contenders)
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        order.shuffle(names)
        for name in names:
            dist.barrier()
            taken = torch.tensor([clock(contenders[name])], device=device)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= warmup:
                times[name].append(float(taken))
    return {name: _timing(found) for name, found in times.items()}


def _timing(milliseconds: list[float]) -> Timing:
    lower, median, upper = statistics.quantiles(milliseconds, n=4)
    return Timing(median, lower, upper)
