"""What a rank of the benchmark does."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate

from tests.benchmarks.front import Front, contenders
from tests.benchmarks.timing import Timing, interleaved


def run(rank: int, world: int, store: str, front: Front, rounds: int, out: str) -> None:
    """One rank, with one thread."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    kinds = dict(zip(("forward", "step"), contenders(front), strict=True))
    found = {kind: interleaved(chosen, rounds, warmup=5) for kind, chosen in kinds.items()}
    if rank == 0:
        Path(out).write_text(json.dumps({kind: _plain(times) for kind, times in found.items()}))
        for kind, times in found.items():
            print(f"\n{kind}, {world} ranks, {front}, milliseconds\n{_table(times)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _plain(times: dict[str, Timing]) -> dict[str, dict[str, float]]:
    return {name: dataclasses.asdict(timing) for name, timing in times.items()}


def _table(times: dict[str, Timing]) -> str:
    """A row per contender; ratios to each of those that come from elsewhere, and to the floor."""
    yardsticks = [name for name in times if name == "floor" or name.startswith("torchrec")]
    rows = [
        [
            name,
            f"{timing.median:.1f}",
            f"{timing.lower:.1f} .. {timing.upper:.1f}",
            *(f"{timing.median / times[other].median:.2f}" for other in yardsticks),
        ]
        for name, timing in times.items()
    ]
    headers = ["", "median", "quartiles", *(f"/ {name}" for name in yardsticks)]
    return tabulate(rows, headers=headers, disable_numparse=True)
