"""Interleaved timing on several ranks: every round runs every contender once, so that a disturbance meets all."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Timing:
    """Milliseconds of the slowest rank: the median of all rounds, and the quartiles around it."""

    median: float
    lower: float
    upper: float


def interleaved(contenders: Mapping[str, Callable[[], object]], rounds: int, warmup: int) -> dict[str, Timing]:
    """Collective. Times every contender `rounds` times, in an order that changes from round to round."""
    names = list(contenders)
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        order.shuffle(names)
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            contenders[name]()
            taken = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= warmup:
                times[name].append(1e3 * float(taken))
    return {name: _timing(found) for name, found in times.items()}


def _timing(milliseconds: list[float]) -> Timing:
    lower, median, upper = statistics.quantiles(milliseconds, n=4)
    return Timing(median, lower, upper)
