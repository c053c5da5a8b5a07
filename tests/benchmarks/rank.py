"""What a rank of the benchmark does."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.benchmarks.contender import Workload
from tests.benchmarks.timing import interleaved


def run(rank: int, world: int, folder: str, workload: Workload, rounds: int, only: str) -> None:
    """One rank, with one thread; rank 0 writes the times to times.json in the folder."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    makers = workload.contenders(init_device_mesh("cpu", (world,)))
    made = {}
    for name in filter(re.compile(only).search, makers):
        made[name] = makers[name]()
        # Compiles here, so that the noise of the compilers is over when the first round begins.
        made[name].forward()
        made[name].step()
        if rank == 0:
            print(f"ready: {name}", file=sys.stderr, flush=True)
    calls = {
        "forward": {name: contender.forward for name, contender in made.items()},
        "step": {name: contender.step for name, contender in made.items()},
    }
    times = {kind: interleaved(chosen, rounds, warmup=3) for kind, chosen in calls.items()}
    if rank == 0:
        plain = {
            kind: {name: dataclasses.asdict(timing) for name, timing in found.items()} for kind, found in times.items()
        }
        Path(folder, "times.json").write_text(json.dumps(plain))
    dist.barrier()
    dist.destroy_process_group()
