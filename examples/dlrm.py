"""Train a DLRM that is sharded by column, beside the same training in one process.

    python examples/dlrm.py --world-size 4                           # gloo on CPU, made-up clicks
    python examples/dlrm.py --world-size 4 --data criteo_sample.csv
    torchrun --nproc-per-node 8 examples/dlrm.py --data log.csv      # NCCL on GPUs

The model below is plain PyTorch and knows nothing of ranks; `shard` holds the one call that
changes that. Each rank trains on its own rows. Rank 0 also trains an unsharded copy on the rows
of all ranks, and the program exits with 1 if the two losses part or if the loss does not fall.
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import autoshard, graph_diff, sharding_plan

COUNTS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
TOLERANCE = 1e-5  # relative, between the sharded and the single-process loss of a step
LEAST_FALL = 0.01  # relative, of the loss over the run
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
}


class DLRM(nn.Module):
    """Deep learning recommendation model (Naumov et al., 2019) with dot interaction.

    counts (B, 13) and ids (B, tables) -> logits (B,). The counts become one vector of `dim` features,
    each id another; the top layers see the first one and the dot products of all pairs of them.
    """

    def __init__(self, rows: int, dim: int, tables: int = len(CATEGORIES)) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(len(COUNTS), 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        for table in self.tables:
            nn.init.uniform_(table.weight, -1 / math.sqrt(dim), 1 / math.sqrt(dim))
        vectors = 1 + tables
        first, second = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)
        self.top = nn.Sequential(
            nn.Linear(dim + len(first), 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, counts: Tensor, ids: Tensor) -> Tensor:
        dense = self.bottom(counts)
        return self.interact(dense, [table(ids[:, i : i + 1]) for i, table in enumerate(self.tables)])

    def interact(self, dense: Tensor, pooled: list[Tensor]) -> Tensor:
        """The vector of the counts and those of the tables, each (B, dim) -> logits (B,)."""
        vectors = torch.stack([dense, *pooled], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = dots[:, self.first, self.second]
        return self.top(torch.cat([dense, pairs], dim=1)).squeeze(1)


class ClickLog(NamedTuple):
    """counts (N, 13) after log1p, ids (N, 26) int64, labels (N,) of 0 and 1."""

    counts: Tensor
    ids: Tensor
    labels: Tensor

    def batch(self, start: int, size: int) -> ClickLog:
        """Rows start to start + size; past its end the log begins again."""
        index = torch.arange(start, start + size, device=self.labels.device) % len(self.labels)
        return ClickLog(*(column[index] for column in self))

    def to(self, device: torch.device, dtype: torch.dtype) -> ClickLog:
        return ClickLog(self.counts.to(device, dtype), self.ids.to(device), self.labels.to(device, dtype))


def hash_category(value: str, rows: int) -> int:
    """Criteo's hexadecimal category -> row of a table; a missing one has row 0 to itself.

    Python's own `hash` of a string differs between processes, hence between ranks.
    """
    return 1 + int(value, 16) % (rows - 1) if value else 0


def read_click_log(path: Path, rows: int, limit: int) -> ClickLog:
    """The first `limit` rows of a Criteo-format CSV with the header label,I1..I13,C1..C26."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = {"label", *COUNTS, *CATEGORIES} - set(reader.fieldnames or ())
        if missing:
            raise SystemExit(f"{path}: no column named {', '.join(sorted(missing))}")
        records = list(itertools.islice(reader, limit))
    if not records:
        raise SystemExit(f"{path}: no rows below the header")
    counts = [[float(record[name] or 0) for name in COUNTS] for record in records]
    ids = [[hash_category(record[name], rows) for name in CATEGORIES] for record in records]
    labels = [float(record["label"]) for record in records]
    # Criteo's second count goes down to -1, where log1p is minus infinity.
    log_counts = torch.tensor(counts, dtype=torch.float64).clamp(min=0).log1p()
    return ClickLog(log_counts, torch.tensor(ids), torch.tensor(labels, dtype=torch.float64))


def make_click_log(rows: int, size: int, seed: int) -> ClickLog:
    """`size` rows of Zipf-distributed ids, each id with a hidden weight that moves the label."""
    random = torch.Generator().manual_seed(seed)
    popularity = 1 / torch.arange(1, rows + 1, dtype=torch.float64)
    draws = torch.multinomial(popularity, size * len(CATEGORIES), replacement=True, generator=random)
    ids = draws.view(size, len(CATEGORIES))
    counts = torch.randn(size, len(COUNTS), generator=random, dtype=torch.float64).exp()
    hidden = torch.randn(len(CATEGORIES), rows, generator=random, dtype=torch.float64)
    logits = hidden[torch.arange(len(CATEGORIES)), ids].sum(dim=1) / 2 - counts.log1p().mean(dim=1)
    clicks = torch.bernoulli(logits.sigmoid(), generator=random)
    return ClickLog(counts.log1p(), ids, clicks)


def shard(model: DLRM, mesh: DeviceMesh, batch: ClickLog, plan: str) -> nn.Module:
    """The sharded model; `model` itself is consumed."""
    return autoshard(model, mesh, plan, example_inputs=(batch.counts, batch.ids))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: ClickLog) -> Tensor:
    """One optimizer step; the mean loss () of `batch` before it."""
    optimizer.zero_grad()
    loss = F.binary_cross_entropy_with_logits(model(batch.counts, batch.ids), batch.labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


class Losses(NamedTuple):
    """The losses of one step."""

    sharded: float
    single: float

    @property
    def difference(self) -> float:
        return abs(self.sharded - self.single) / abs(self.single)


def complaints(history: list[Losses]) -> list[str]:
    """What is wrong with a training run; empty if nothing is."""
    found = []
    # `not <=` rather than `>`: a loss that is not a number has parted too.
    parted = [i for i, losses in enumerate(history) if not losses.difference <= TOLERANCE]
    if parted:
        found.append(
            f"sharded and single-process loss part at step {parted[0]}: "
            f"relative difference {history[parted[0]].difference:.1e}, allowed {TOLERANCE:.0e}"
        )
    first, last = history[0].sharded, history[-1].sharded
    if not last <= (1 - LEAST_FALL) * first:
        found.append(f"the loss does not fall: {first:.4f} at first, {last:.4f} at last")
    return found


def loss_table(history: list[Losses]) -> str:
    return tabulate(
        [(i, *losses, losses.difference) for i, losses in enumerate(history)],
        headers=["step", "sharded loss", "single-process loss", "relative difference"],
        floatfmt=("", ".8f", ".8f", ".1e"),
    )


def progress(steps: int, show: bool) -> Iterable[int]:
    """The step numbers, behind a progress bar where there is a terminal and tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return range(steps)
    return tqdm(range(steps), desc="training", unit="step", disable=None if show else True)


def load(args: argparse.Namespace, global_batch: int) -> ClickLog:
    """The same log on every rank. A made-up one is short enough to be seen several times."""
    if args.data is not None:
        return read_click_log(args.data, args.rows, args.steps * global_batch)
    return make_click_log(args.rows, 4 * global_batch, args.seed)


def run(rank: int, world_size: int, device: torch.device, args: argparse.Namespace) -> list[str]:
    """Train on this rank; rank 0 returns what is wrong with the run, the others nothing."""
    global_batch = world_size * args.batch_size
    log = load(args, global_batch).to(device, args.dtype)
    torch.manual_seed(args.seed)
    model = DLRM(args.rows, args.dim).to(device, args.dtype)
    new_optimizer = OPTIMIZERS[args.optimizer]

    single = copy.deepcopy(model) if rank == 0 else None
    single_optimizer = new_optimizer(single.parameters(), lr=args.lr) if single else None

    mesh = init_device_mesh(device.type, (world_size,))
    sharded = shard(model, mesh, log.batch(0, args.batch_size), args.plan)
    optimizer = new_optimizer(sharded.parameters(), lr=args.lr)
    if rank == 0:
        diff = graph_diff(sharded)
        print(sharding_plan(sharded), diff, diff.summary(), sep="\n\n", flush=True)
    compiled = torch.compile(sharded, fullgraph=True) if args.compile else sharded

    history = []
    for step in progress(args.steps, show=rank == 0):
        # The last step has the rows of the first, whose loss must have fallen: batches differ.
        start = step % (args.steps - 1) * global_batch
        mine = log.batch(start + rank * args.batch_size, args.batch_size)
        loss = mean_over_ranks(train_step(compiled, optimizer, mine))
        if single is not None:
            everyones = log.batch(start, global_batch)
            history.append(Losses(loss, train_step(single, single_optimizer, everyones).item()))

    if rank != 0:
        return []
    print(loss_table(history))
    return complaints(history)


def exit_status(found: list[str]) -> int:
    for complaint in found:
        print(f"FAILED: {complaint}", file=sys.stderr)
    return 1 if found else 0


def run_spawned(rank: int, world_size: int, store: str, args: argparse.Namespace) -> None:
    """One of `world_size` processes on this machine's CPU."""
    # Each process would otherwise start a thread per core.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    found = run(rank, world_size, torch.device("cpu"), args)
    dist.destroy_process_group()
    sys.exit(exit_status(found))


def run_under_torchrun(args: argparse.Namespace) -> int:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    found = run(dist.get_rank(), dist.get_world_size(), device, args)
    dist.destroy_process_group()
    return exit_status(found)


def spawn(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(
                run_spawned,
                (args.world_size, f"{folder}/store", args),
                nprocs=args.world_size,
            )
        except torch.multiprocessing.ProcessExitedException as exited:
            return exited.exit_code
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--world-size", type=int, default=2, help="processes to start; torchrun has its own count")
    add("--data", type=Path, help="Criteo-format CSV file; without one a click log is made up")
    add("--rows", type=int, default=1000, help="rows of each of the 26 tables, at least 2")
    add("--dim", type=int, default=16, help="features of each table")
    add("--batch-size", type=int, default=16, help="rows per rank and step")
    add(
        "--steps",
        type=int,
        default=20,
        help="optimizer steps, at least 2; the last has the rows of the first",
    )
    add(
        "--plan",
        choices=("auto", "colwise", "paired"),
        default="paired",
        help="paired shards all that it can; auto leaves whole what is faster whole, as small tables are",
    )
    add("--lr", type=float, default=0.01, help="learning rate")
    add("--optimizer", choices=OPTIMIZERS, default="adagrad")
    add("--dtype", choices=("float64", "float32"), default="float64")
    add("--no-compile", dest="compile", action="store_false", help="train without torch.compile")
    add("--seed", type=int, default=0, help="of the weights and of the made-up click log")
    args = parser.parse_args()
    least_of = {"world_size": 1, "rows": 2, "dim": 1, "batch_size": 1, "steps": 2}
    for name, least in least_of.items():
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if args.data is not None and not args.data.is_file():
        parser.error(f"--data: there is no file {args.data}")
    args.dtype = getattr(torch, args.dtype)
    return args


def main() -> int:
    args = parse_arguments()
    return run_under_torchrun(args) if "RANK" in os.environ else spawn(args)


if __name__ == "__main__":
    sys.exit(main())
