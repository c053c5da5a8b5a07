"""`python -m tests.benchmarks.plans` measures every plan of ten models, and whether the automatic one is near the best.

For each model the steps (forward, backward, SGD) of several plans run interleaved; beside each stands what the cost
model says, by a profile that the same processes have just measured. A line sums up: the automatic plan over the best,
and the pairs of plans whose times differ by more than a tenth and whose predicted order is the other one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from autoshard import AutoPlan, Colwise, HardwareProfile, autoshard, sharding_plan
from autoshard.calibrate import measure
from autoshard.export import capture_export
from autoshard.facts import gather_facts
from autoshard.planner import planned_weights, searched_groups
from autoshard.search import estimate
from passes.pipeline import normalize
from passes.plan import ShardingPlan
from tests.benchmarks.timing import interleaved


@dataclass(frozen=True)
class Shape:
    """A model of tables (V, D), whose pooled bags of L ids go through an MLP together with dense features.

    Attributes:
        tables: (how many, V, D, L), ....
        dense: features besides.
        mlp: widths of the layers behind; none if empty.
        batch: rows per rank.
        replicated: True if all ranks have the same rows.
    """

    tables: tuple[tuple[int, int, int, int], ...] = ()
    dense: int = 0
    mlp: tuple[int, ...] = ()
    batch: int = 256
    replicated: bool = False


SHAPES = {
    "eight tables": Shape(((8, 20_000, 64, 4),)),
    "forty small tables": Shape(((40, 100, 16, 2),)),
    "three large tables": Shape(((3, 200_000, 64, 20),)),
    "narrow tables": Shape(((12, 50_000, 8, 4),)),
    "large and small tables": Shape(((3, 100_000, 64, 4), (10, 50, 16, 1)), batch=512),
    "dlrm": Shape(((6, 50_000, 32, 1),), 13, (256, 64, 1)),
    "mlp, own rows": Shape((), 256, (1024, 256)),
    "mlp, same rows": Shape((), 1024, (4096, 1024), 64, True),
    "wide linear, same rows": Shape((), 1024, (8192,), 32, True),
    "tables, same rows": Shape(((4, 100_000, 64, 4),), 0, (256, 64), 256, True),
}


class Model(nn.Module):
    """ids (T, B, L) each, x (B, F) -> (B, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        kinds = [(rows, width) for number, rows, width, _ in shape.tables for _ in range(number)]
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows, width in kinds)
        width = shape.dense + sum(width for _, width in kinds)
        layers: list[nn.Module] = []
        for out in shape.mlp:
            layers += [nn.Linear(width, out), nn.ReLU()]
            width = out
        self.mlp = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor, *ids: Tensor) -> Tensor:
        pooled = [table(own) for table, own in zip(self.tables, ids, strict=True)]
        together: Tensor = self.mlp(torch.cat([x, *pooled], 1))
        return together


def draw(shape: Shape, seed: int) -> tuple[Tensor, ...]:
    """A batch of one rank."""
    generator = torch.Generator().manual_seed(seed)
    ids = [
        torch.randint(0, rows, (shape.batch, bag), generator=generator)
        for number, rows, _, bag in shape.tables
        for _ in range(number)
    ]
    return torch.randn(shape.batch, shape.dense, generator=generator), *ids


def plans(shape: Shape, world: int, profile: HardwareProfile) -> dict[str, Any]:
    """What is tried."""
    automatic = AutoPlan(profile=profile, optimizer_states=0, memory_per_rank=1e15)
    found: dict[str, Any] = {"AutoPlan": automatic, "colwise": "colwise", "replicate": {"*": "replicate"}}
    if shape.tables and shape.mlp:
        found["tables colwise"] = {"tables.*": "colwise", "*": "replicate"}
    if len(shape.mlp) > 1:
        found["pairs"] = "paired"
    if shape.tables and not shape.replicated and world > 1:
        number = sum(count for count, *_ in shape.tables)
        found["tables on a rank each"] = {
            **{f"tables.{place}.weight": Colwise((place % world,)) for place in range(number)},
            "*": "replicate",
        }
    return found


def predicted(shape: Shape, plan: ShardingPlan, profile: HardwareProfile, world: int) -> float:
    """Milliseconds, by the cost model."""
    model = Model(shape)
    found = capture_export(model, draw(shape, 0))
    for region in found.regions:
        normalize(region.graph)
    facts = gather_facts(model, found)
    groups, setting = searched_groups(
        AutoPlan(profile=profile, optimizer_states=0),
        found,
        facts,
        planned_weights(model, facts),
        world,
        batch_sharded=not shape.replicated,
        ragged=(),
        device_type="cpu",
    )
    return 1e3 * estimate(groups, setting, plan)[0]


def step(model: nn.Module, batch: tuple[Tensor, ...], compiled: bool) -> Callable[[], None]:
    """Forward, backward and an SGD step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = torch.compile(model, fullgraph=True) if compiled else model

    def call() -> None:
        optimizer.zero_grad()
        run(*batch).sum().backward()
        optimizer.step()

    return call


def measured(shape: Shape, profile: HardwareProfile, rounds: int, compiled: bool) -> dict[str, tuple[float, float]]:
    """Plan -> milliseconds predicted and measured. Collective."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    batch = draw(shape, 0 if shape.replicated else dist.get_rank())
    placement = Replicate() if shape.replicated else Shard(0)
    steps, said = {}, {}
    for name, plan in plans(shape, mesh.size(), profile).items():
        torch.manual_seed(0)
        model = autoshard(Model(shape), mesh, plan, example_inputs=batch, input_placement=placement)
        said[name] = predicted(shape, sharding_plan(model), profile, mesh.size())
        steps[name] = step(model, batch, compiled)
    times = interleaved(steps, rounds, warmup=3)
    return {name: (said[name], timing.median) for name, timing in times.items()}


def summary(found: dict[str, tuple[float, float]]) -> tuple[float, list[str]]:
    """The automatic plan's time over the best, and the pairs whose predicted order is wrong."""
    best = min(time for _, time in found.values())
    swapped = [
        f"{one} / {other}"
        for (one, (said, time)), (other, (other_said, other_time)) in itertools.combinations(found.items(), 2)
        if max(time, other_time) > 1.1 * min(time, other_time) and (said - other_said) * (time - other_time) < 0
    ]
    return found["AutoPlan"][1] / best, swapped


def run(rank: int, world: int, store: str, names: list[str], rounds: int, compiled: bool, out: str) -> None:
    """One rank, with one thread."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    profile = measure("gloo", max(rounds, 5))
    every = {}
    for name in names:
        found = every[name] = measured(SHAPES[name], profile, rounds, compiled)
        if rank == 0:
            ratio, swapped = summary(found)
            rows = [[plan, f"{said:.2f}", f"{time:.2f}"] for plan, (said, time) in found.items()]
            table = tabulate(rows, headers=["", "predicted", "measured"], disable_numparse=True)
            print(f"\n{name}, {world} ranks, {SHAPES[name]}, milliseconds\n{table}", flush=True)
            print(f"AutoPlan / best: {ratio:.2f}; order that was not predicted: {', '.join(swapped) or 'none'}")
    if rank == 0:
        Path(out).write_text(json.dumps({"profile": json.loads(profile.to_json()), "models": every}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.plans", description=__doc__)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--compile", action="store_true", help="compile the steps; eager without")
    parser.add_argument("--model", action="append", choices=SHAPES, help="one of them; all without")
    parser.add_argument("--out", default="plans.json", help="where the times go, as JSON")
    options = parser.parse_args()
    names = options.model or list(SHAPES)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.world_size, f"{folder}/store", names, options.rounds, options.compile, options.out)
        mp.spawn(run, args=arguments, nprocs=options.world_size)  # type: ignore[no-untyped-call]  # torch's


if __name__ == "__main__":
    main()
