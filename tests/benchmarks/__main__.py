"""Time autoshard beside its peers, interleaved in one run: `python -m tests.benchmarks`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from tests.benchmarks import report
from tests.benchmarks.contender import Workload, resized
from tests.benchmarks.rank import run
from tests.benchmarks.workloads import WORKLOADS

ALL = "all"


def main() -> None:
    options = _options()
    names = list(WORKLOADS) if options.workload == ALL else [options.workload]
    machine = {"torch": torch.__version__, "cpus": os.cpu_count(), "machine": platform.machine()}
    # What a rank needs to run it, and nothing that another workload has left behind: fresh processes for each.
    found: dict[str, Any] = {}
    for name in names:
        workload = resized(WORKLOADS[name], options.size)
        times = _measure(workload, options)
        found[name] = {"sizes": dataclasses.asdict(workload), **times}  # type: ignore[call-overload]  # all are dataclasses
        for kind, by_contender in times.items():
            print(f"\n{name}, {kind}, {options.world_size} ranks, {workload}, milliseconds")
            print(report.table(by_contender), flush=True)
        # After each, so that a run that is broken off leaves what it has.
        facts = {"ranks": options.world_size, "rounds": options.rounds, **machine, "workloads": found}
        Path(options.out).write_text(json.dumps(facts, indent=1))
    if options.plot is not None:
        kinds = {name: {kind: times for kind, times in item.items() if kind != "sizes"} for name, item in found.items()}
        report.plot(kinds, f"{options.world_size} ranks, median of {options.rounds} rounds", options.plot)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--workload", choices=[*WORKLOADS, ALL], default="front")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21, help="at least 2")
    parser.add_argument("--only", default="", help="a regular expression that a contender's name must contain")
    parser.add_argument(
        "--size", action="append", default=[], metavar="NAME=NUMBER", help="another size, such as batch=256"
    )
    parser.add_argument("--out", default="benchmark.json", help="where the times go, as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them too, as a PNG")
    return parser.parse_args()


def _measure(workload: Workload, options: argparse.Namespace) -> dict[str, report.Times]:
    world = options.world_size
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, folder, workload, options.rounds, options.only)
        mp.spawn(run, args=arguments, nprocs=world)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        times: dict[str, report.Times] = json.loads(Path(folder, "times.json").read_text())
    return times


if __name__ == "__main__":
    main()
