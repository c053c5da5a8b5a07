"""`python -m tests.benchmarks` times autoshard beside its peers, in one interleaved run."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile

import torch.multiprocessing as mp

from tests.benchmarks.front import Front
from tests.benchmarks.ranks import run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", default="benchmark.json", help="where the times go, as JSON")
    for field in dataclasses.fields(Front):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    options = vars(parser.parse_args())
    world, rounds, out = (options.pop(name) for name in ("world_size", "rounds", "out"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, f"{folder}/store", Front(**options), rounds, out)
        mp.spawn(run, args=arguments, nprocs=world)  # type: ignore[no-untyped-call]  # torch leaves it untyped


if __name__ == "__main__":
    main()
