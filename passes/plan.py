"""What is done with each parameter, and why: plain frozen data that prints as a table and travels as JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from tabulate import tabulate

from passes.errors import PlanError, describe
from passes.layout import owner_sizes

COLWISE = "colwise"
ROWWISE = "rowwise"
REPLICATE = "replicate"
STRATEGIES = (COLWISE, ROWWISE, REPLICATE)


@dataclasses.dataclass(frozen=True)
class Colwise:
    """Columns on some of the ranks: a strategy for the table of an embedding or embedding_bag.

    Attributes:
        ranks: places in the mesh, ascending; one rank holds the whole table, several share its feature axis by the rule
            of `torch.chunk`.
    """

    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One parameter: the strategy and its reason.

    Attributes:
        parameter: name in the model; a tied parameter goes by its first name.
        shape: of the whole parameter.
        dtype: as torch prints it, without "torch.".
        strategy: "colwise" (sharded along the feature axis), "rowwise" (a linear's weight, sharded along its input
            axis) or "replicate".
        dim: the dimension that is sharded, None if none is.
        sites: the layers that use it, as "op module.path".
        reason: why this strategy.
        aliases: further names of a tied parameter.
        ranks: where its columns are, as places in the mesh; None for all ranks.
        explanation: what the reason leaves out: the costs of the choices that there were; for `ShardingPlan.explain`.
        sparse_gradient: True if a lookup with sparse=True uses it. DTensor carries no sparse gradient, so the parameter
            is then a plain tensor of this rank's columns; state_dict shows it as a DTensor all the same.
    """

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    strategy: str
    dim: int | None
    sites: tuple[str, ...]
    reason: str
    aliases: tuple[str, ...] = ()
    sparse_gradient: bool = False
    ranks: tuple[int, ...] | None = None
    explanation: str = ""

    def sizes(self, world_size: int) -> list[int]:
        """What each rank holds of the sharded dimension; only for a row that is sharded."""
        assert self.dim is not None
        return owner_sizes(self.shape[self.dim], world_size, range(world_size) if self.ranks is None else self.ranks)


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """Parameter name -> what is done with it, for every weight of an embedding, embedding_bag and linear.

    Attributes:
        rows: one per parameter, in the order of the model.
        world_size: ranks in the mesh.
        notes: what a person should know besides: modules that stay as they are, ops that mix rows of the batch.
    """

    rows: tuple[PlanRow, ...]
    world_size: int
    notes: tuple[str, ...] = ()

    def row(self, parameter: str) -> PlanRow:
        """The row of a parameter, by any of its names.

        Raises:
            PlanError: if the plan has none.
        """
        row = self._by_name.get(parameter)
        if row is not None:
            return row
        raise PlanError(
            describe(
                "the plan",
                f"it has no row for {parameter!r}",
                "the name of an embedding, embedding_bag or linear parameter",
                "print(plan) lists them.",
            )
        )

    @functools.cached_property
    def _by_name(self) -> dict[str, PlanRow]:
        return {name: row for row in reversed(self.rows) for name in (row.parameter, *row.aliases)}

    def explain(self, parameter: str) -> str:
        """What is done with a parameter, and why: what it costs, what the next best would, what would change that.

        Raises:
            PlanError: if the plan has no row for it.
        """
        row = self.row(parameter)
        shape = " x ".join(map(str, row.shape))
        lines = [f"{row.parameter} ({shape}, {row.dtype}): {_strategy(row)}", row.reason, row.explanation]
        return "\n  ".join(line.replace("\n", "\n  ") for line in lines if line)

    @functools.cached_property
    def sharded(self) -> frozenset[str]:
        """All names of the parameters that are sharded."""
        return frozenset(name for name, row in self._by_name.items() if row.strategy != REPLICATE)

    def has_owners(self, parameter: str) -> bool:
        """True for a parameter whose columns are on some of the ranks only."""
        row = self._by_name.get(parameter)
        return row is not None and row.ranks is not None

    def has_sparse_gradient(self, parameter: str) -> bool:
        """True for a table that a lookup with sparse=True uses."""
        row = self._by_name.get(parameter)
        return row is not None and row.sparse_gradient

    def to_json(self) -> str:
        """The plan as JSON; `from_json` gives back an equal plan."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ShardingPlan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: if the text is not such a plan.
        """
        try:
            data = json.loads(text)
            rows = tuple(PlanRow(**_tuples(row)) for row in data.pop("rows"))
            return cls(rows=rows, **_tuples(data))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(
                describe(
                    "ShardingPlan.from_json",
                    f"the text is no plan ({error})",
                    "what ShardingPlan.to_json wrote",
                    "Write the plan again with to_json().",
                )
            ) from error

    def __str__(self) -> str:
        table = tabulate(
            [
                [
                    row.parameter + "".join(f"\n= {alias}" for alias in row.aliases),
                    " x ".join(map(str, row.shape)),
                    row.dtype,
                    _strategy(row),
                    "\n".join(row.sites) or "-",
                    row.reason,
                ]
                for row in self.rows
            ],
            headers=["parameter", "shape", "dtype", "strategy", "used by", "why"],
            maxcolwidths=[None, None, None, None, 40, 48],
        )
        notes = "".join(f"\n* {note}" for note in self.notes)
        ranks = f"{self.world_size} rank" + ("" if self.world_size == 1 else "s")
        return f"Sharding plan over {ranks}\n{table}{notes}"


def _strategy(row: PlanRow) -> str:
    where = "" if row.ranks is None else f" on {', '.join(map(str, row.ranks))}"
    return row.strategy if row.dim is None else f"{row.strategy}{where} (dim {row.dim})"


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}
