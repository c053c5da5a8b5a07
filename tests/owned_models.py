"""Models whose tables are on some of the ranks, with their batches."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from autoshard import Colwise

Batch = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Table:
    """One lookup: "offsets" and "last" are bags of 1-D ids, "bags" of 2-D ids, "ids" an embedding."""

    kind: str
    dim: int
    mode: str = "sum"
    weighted: bool = False


TWELVE = (
    Table("offsets", 4),
    Table("offsets", 8, "mean"),
    Table("last", 16, "max"),
    Table("offsets", 128),
    Table("offsets", 12, weighted=True),
    Table("last", 5, "mean"),
    Table("bags", 6, "mean"),
    Table("bags", 32),
    Table("ids", 7),
    Table("offsets", 64, "max"),
    Table("last", 24, weighted=True),
    Table("ids", 10),
)
FIXED = (Table("bags", 6), Table("bags", 9, "max"), Table("ids", 5), Table("bags", 4, "mean", weighted=True))


class Tables(nn.Module):
    """All lookups side by side: rows (B, sum of dims)."""

    def __init__(self, tables: tuple[Table, ...], sparse: bool = False) -> None:
        super().__init__()
        self.lookups = nn.ModuleList(self._layer(number, table, sparse) for number, table in enumerate(tables))
        self.tables = tables

    @staticmethod
    def _layer(number: int, table: Table, sparse: bool) -> nn.Module:
        if table.kind == "ids":
            return nn.Embedding(20 + number, table.dim, padding_idx=3, sparse=sparse)
        last = table.kind == "last"
        sparse = sparse and table.mode != "max"
        return nn.EmbeddingBag(20 + number, table.dim, mode=table.mode, include_last_offset=last, sparse=sparse)

    def forward(self, batch: Batch) -> Tensor:
        rows = []
        for number, (table, lookup) in enumerate(zip(self.tables, self.lookups, strict=True)):
            ids = batch[f"ids{number}"]
            if table.kind == "ids":
                rows.append(lookup(ids))
                continue
            offsets = None if table.kind == "bags" else batch[f"offsets{number}"]
            weights = batch[f"weights{number}"] if table.weighted else None
            rows.append(lookup(ids, offsets, per_sample_weights=weights))
        return torch.cat(rows, 1)


def make(tables: tuple[Table, ...] = TWELVE, *, sparse: bool = False) -> Tables:
    torch.manual_seed(0)
    return Tables(tables, sparse).double()


def plan(tables: tuple[Table, ...], world: int) -> dict[str, str | Colwise]:
    """Tables on one rank, on two, and on all, in turn."""
    found: dict[str, str | Colwise] = {}
    for number in range(len(tables)):
        first, second = number % world, (number + 1 + number // 3) % world
        choices = ["colwise", Colwise((first,)), Colwise(tuple(sorted({first, second})))]
        found[f"lookups.{number}.weight"] = choices[(number + 1) % 3]
    return found


def batch(tables: tuple[Table, ...], rows: int, seed: int, fewest: int = 20) -> Batch:
    """`rows` rows; 1-D ids of a number that depends on the seed, at least `fewest`, and empty bags.

    The numbers of no two lookups are equal: sizes that are equal in one batch are compiled as equal.
    """
    draw = torch.Generator().manual_seed(seed)
    inputs: Batch = {}
    for number, table in enumerate(tables):
        count = fewest + int(torch.randint(0, 9, (), generator=draw)) + 10 * number
        shape = {"ids": (rows,), "bags": (rows, 3)}.get(table.kind, (count,))
        inputs[f"ids{number}"] = torch.randint(0, 20 + number, shape, generator=draw)
        if table.kind in ("offsets", "last"):
            starts = torch.randint(0, count + 1, (rows - 1,), generator=draw).sort().values
            ends = [torch.tensor([count])] if table.kind == "last" else []
            inputs[f"offsets{number}"] = torch.cat([torch.zeros(1).long(), starts, *ends])
        if table.weighted:
            weights = torch.rand(shape, generator=draw, dtype=torch.float64)
            inputs[f"weights{number}"] = weights.requires_grad_()
    return inputs


def joined(tables: tuple[Table, ...], batches: list[Batch]) -> Batch:
    """The batches one after the other, as one process gets them."""
    inputs = {name: torch.cat([own[name] for own in batches]) for name in batches[0] if "offsets" not in name}
    for number, table in enumerate(tables):
        if table.kind not in ("offsets", "last"):
            continue
        base, parts = 0, []
        for own in batches:
            starts = own[f"offsets{number}"]
            parts.append((starts[:-1] if table.kind == "last" else starts) + base)
            base += own[f"ids{number}"].size(0)
        inputs[f"offsets{number}"] = torch.cat([*parts, *([torch.tensor([base])] if table.kind == "last" else [])])
    return inputs
