"""Lookups beside what the memory of a GPU can do, and a training step with and without CUDA graphs.

    python -m tests.benchmarks.gpu                              # one GPU
    torchrun --nproc-per-node 8 -m tests.benchmarks.gpu         # NCCL, a GPU for each rank
    python -m tests.benchmarks.gpu --device cpu                 # gloo, small sizes: to see that it runs

front   lookup, pooling and rearrangement of many tables, compiled, without a gradient: the bytes that it cannot do
        without (`MemoryTraffic`) over its time, beside a copy of as many bytes and beside the bare lookup, by torch's
        kernel and by the one that Inductor makes of a lookup and a sum. On a GPU its own time counts, not the host's;
        tables and copy are far larger than its cache. With several ranks the time has the wire in it, so that the
        share of the copy's bandwidth means most on one.
step    the DLRM of `dlrm.py`: forward, loss, backward, SGD; eager, compiled, and compiled into CUDA graphs. What the
        host takes counts, since that is what CUDA graphs save.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.benchmarks import report
from tests.benchmarks.contender import resized
from tests.benchmarks.dlrm import CUDA_GRAPHS, DLRM
from tests.benchmarks.tables import Tables, own_columns
from tests.benchmarks.timing import Call, Timing, device_time, finished_time, host_time, interleaved

COPY, WHOLE = "copy", "autoshard compiled"
LOOKUP, FUSED = "bare embedding_bag", "bare embedding and sum, compiled"
WARMUP = 3  # rounds: a CUDA graph takes one to warm up, one to be recorded

FRONTS = {
    "cuda": Tables(tables=26, rows=1_000_000, dim=128, batch=8192, ids=20, device="cuda"),
    "cpu": Tables(tables=26, rows=20_000, dim=64, batch=1024, ids=20),
}
STEPS = {
    "cuda": DLRM(tables=26, rows=100_000, dim=128, batch=8192, device="cuda"),
    "cpu": DLRM(tables=26, rows=20_000, dim=64, batch=1024),
}


@dataclass(frozen=True)
class MemoryTraffic:
    """The bytes that a rank's memory moves at least in `Tables`, forward, with float32 values and int32 ids.

    A rank holds d = D/W columns of each of T tables, and looks up the W*B*T bags of all ranks, of L ids each:

        rows      W*B*T*L * d * 4    read: the lookups' rows; no two of them are taken to meet in a cache
        ids       W*B*T*L * 4        read: the lookup's own, as they travel
        results   W*B*T * d * 4      written: a row for each bag
        moved     twice the results  the rearrangement reads the bags of B*T rows from W ranks, W*B*T * d values, and
                                     writes (B, T*D), which is as many

    What packs ids, what checks them and what a collective copies is not counted: a share of the copy's bandwidth is
    smaller for it, never larger.
    """

    rows: int
    ids: int
    results: int
    moved: int

    @classmethod
    def of(cls, sizes: Tables, world: int) -> MemoryTraffic:
        """Of one of `world` ranks; `world` divides D."""
        bags, columns = world * sizes.batch * sizes.tables, sizes.dim // world
        results = 4 * bags * columns
        return cls(rows=results * sizes.ids, ids=4 * bags * sizes.ids, results=results, moved=2 * results)

    @property
    def lookup(self) -> int:
        """Of the lookup and its pooling."""
        return self.rows + self.ids + self.results

    @property
    def whole(self) -> int:
        """Of the rearrangement too."""
        return self.lookup + self.moved


@dataclass(frozen=True)
class Bandwidth:
    """Bytes that were moved, read and written, and how long that took."""

    nbytes: int
    time: Timing

    @property
    def rate(self) -> float:
        """GB/s, of the median time."""
        return self.nbytes / self.time.median / 1e6


def front(sizes: Tables, mesh: DeviceMesh, rounds: int) -> dict[str, Bandwidth]:
    """COPY, the bare LOOKUP and FUSED, and WHOLE, interleaved. Collective.

    Args:
        sizes: on the mesh's device; float32 tables take T*V*D*4 / W bytes of a rank, of which it needs room for three:
            those of the model, what they are stacked from, and those of the bare lookup.
        mesh: of all ranks.
        rounds: at least 2.
    """
    device = mesh.device_type
    own_columns(sizes, mesh)
    traffic = MemoryTraffic.of(sizes, mesh.size())
    calls = {
        WHOLE: sizes.contenders(mesh)[WHOLE]().forward,
        **_bare_lookups(sizes, mesh),
        COPY: _copy(traffic.whole // 2, device),
    }
    nbytes = {COPY: traffic.whole, LOOKUP: traffic.lookup, FUSED: traffic.lookup, WHOLE: traffic.whole}
    clock = device_time if device == "cuda" else host_time
    times = interleaved(calls, rounds, WARMUP, clock, device)
    return {name: Bandwidth(nbytes[name], times[name]) for name in nbytes}


def _bare_lookups(sizes: Tables, mesh: DeviceMesh) -> dict[str, Call]:
    """Of this rank's columns of all tables, by ids that stand there already."""
    rows = sizes.tables * sizes.rows
    stack = torch.randn(rows, own_columns(sizes, mesh), device=sizes.device)
    bags = mesh.size() * sizes.batch * sizes.tables
    ids = torch.randint(0, rows, (bags, sizes.ids), dtype=torch.int32, device=sizes.device)

    @torch.compile(fullgraph=True)
    def fused() -> Tensor:
        return F.embedding(ids, stack).sum(1)

    return {LOOKUP: lambda: F.embedding_bag(ids, stack, mode="sum"), FUSED: fused}


def _copy(nbytes: int, device: str) -> Call:
    """Of so many bytes, which are read and written."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def steps(sizes: DLRM, mesh: DeviceMesh, rounds: int) -> dict[str, Timing]:
    """A training step of each way to run the sharded model, interleaved. Collective; `rounds` is at least 2."""
    makers = sizes.contenders(mesh)
    calls = {}
    for name in (name for name in makers if name.startswith("autoshard")):
        calls[name] = makers[name]().step
        # Compiles here, so that the noise of the compilers is over when the first round begins.
        calls[name]()
    clock = finished_time if mesh.device_type == "cuda" else host_time
    return interleaved(calls, rounds, WARMUP, clock, mesh.device_type)


def shares(found: Mapping[str, Bandwidth]) -> dict[str, float]:
    """Of the copy's bandwidth, of each."""
    return {name: bandwidth.rate / found[COPY].rate for name, bandwidth in found.items()}


def front_table(found: Mapping[str, Bandwidth]) -> str:
    """A row for each."""
    share = shares(found)
    rows = [
        [
            name,
            f"{bandwidth.nbytes / 1e9:.3f}",
            f"{bandwidth.time.median:.3f}",
            f"{bandwidth.time.lower:.3f} .. {bandwidth.time.upper:.3f}",
            f"{bandwidth.rate:.0f}",
            f"{share[name]:.2f}",
        ]
        for name, bandwidth in found.items()
    ]
    headers = ["", "GB", "median, ms", "quartiles", "GB/s", "/ copy"]
    return tabulate(rows, headers=headers, disable_numparse=True)


@contextmanager
def all_ranks(device: str) -> Iterator[DeviceMesh]:
    """Those that torchrun has started, or this process alone.

    Raises:
        SystemExit: if this rank is to have a GPU and there is none for it.
    """
    started = "RANK" in os.environ
    place = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        gpus = torch.cuda.device_count()
        if place >= gpus:
            raise SystemExit(
                f"--device cuda: torch {torch.__version__} sees {gpus} GPUs here, and every rank needs its own. Run it "
                "where they are, with a CUDA build of torch and no more ranks than GPUs, or pass --device cpu."
            )
        torch.cuda.set_device(place)
    how: dict[str, Any] = {} if started else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if device == "cuda":
        dist.init_process_group("nccl", device_id=torch.device("cuda", place), **how)
    else:
        dist.init_process_group("gloo", **how)
    try:
        yield init_device_mesh(device, (dist.get_world_size(),))
    finally:
        dist.destroy_process_group()


def main() -> None:
    options = _options()
    warnings.simplefilter("ignore")
    with all_ranks(options.device) as mesh:
        facts = _measured(options, mesh, say=mesh.get_local_rank() == 0)
        if options.out is not None and mesh.get_local_rank() == 0:
            options.out.write_text(json.dumps(facts, indent=1))


def _measured(options: argparse.Namespace, mesh: DeviceMesh, say: bool) -> dict[str, Any]:
    sizes = resized(FRONTS[options.device], options.front)
    bandwidths = front(sizes, mesh, options.rounds)
    if say:
        print(f"front, {mesh.size()} ranks, {sizes}\n{front_table(bandwidths)}", flush=True)
    of_step = resized(STEPS[options.device], options.step)
    skipped = counters["inductor"]["cudagraph_skips"]
    times = {name: dataclasses.asdict(timing) for name, timing in steps(of_step, mesh, options.rounds).items()}
    skipped = counters["inductor"]["cudagraph_skips"] - skipped
    if say:
        print(f"\nstep, {mesh.size()} ranks, {of_step}, milliseconds")
        print(report.table(times, yardsticks=["autoshard eager"], digits=3))
        graphs = f"CUDA graphs that Inductor left out: {skipped}"
        print(graphs if CUDA_GRAPHS in times else f"{CUDA_GRAPHS}: left out, there are none on a {options.device}")
    share = shares(bandwidths)
    return {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "ranks": mesh.size(),
        "rounds": options.rounds,
        "torch": torch.__version__,
        "front": {
            "sizes": dataclasses.asdict(sizes),
            "found": {
                name: {"bytes": item.nbytes, **dataclasses.asdict(item.time), "GB/s": item.rate, "/ copy": share[name]}
                for name, item in bandwidths.items()
            },
        },
        "step": {"sizes": dataclasses.asdict(of_step), "found": times, "CUDA graphs left out": skipped},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=list(FRONTS), default="cuda")
    parser.add_argument("--rounds", type=int, default=21, help="at least 2")
    for name in ("front", "step"):
        parser.add_argument(
            f"--{name}", action="append", default=[], metavar="NAME=NUMBER", help="another size, such as batch=256"
        )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the times and bandwidths too, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
