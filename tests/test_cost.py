"""The bytes of the cost model are those that a counting process group sees, for every strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from autoshard import Colwise, autoshard
from autoshard.cost import (
    COLLECTIVES,
    OWNED,
    Cost,
    Sizes,
    colwise_lower_bound,
    evaluate,
    site_cost,
    weight_cost,
)
from passes.plan import COLWISE, REPLICATE, ROWWISE
from passes.sites import EMBEDDING, EMBEDDING_BAG, LINEAR
from passes.traffic import BACKWARD, FORWARD
from tests.counting import counting_mesh
from tests.pool import Pool

ROWS, V = 5, 23


class Bag(nn.Module):
    """ids (B, 3) -> (B, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(V, width, mode="sum")

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class WeightedBags(Bag):
    """ids (2*B,), offsets (B,), weights (2*B,) -> (B, D)."""

    def forward(self, ids: Tensor) -> Tensor:
        offsets = torch.arange(0, 2 * ids.size(0), 2)
        flat = ids[:, :2].flatten()
        return self.table(flat, offsets, flat.to(self.table.weight.dtype))


class Lookup(nn.Module):
    """ids (B, 3) -> (B, 3, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(V, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Twice(nn.Module):
    """Two tables that look up the same ids (B, 3) -> (B, 2*D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.EmbeddingBag(V, width, mode="sum") for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([self.one(ids), self.two(ids)], 1)


class Dense(nn.Module):
    """ids (B, 3) -> (B, 3, D), through a table that is whole and of which a gradient is wanted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(V, 6)
        self.linear = nn.Linear(6, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.table(ids).sin())


class First(nn.Module):
    """ids (B, 3) -> (B, D): a linear to whose input no gradient goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(ids.to(self.linear.weight.dtype))


class Pair(nn.Module):
    """ids (B, 3) -> (B, 4): D columns go from one linear to the next."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, width), nn.Linear(width, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.two(self.one(ids.to(self.one.weight.dtype)).relu())


class Projected(nn.Module):
    """ids (B, 3) -> (B, 3, 4): D columns go from a table to a linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(V, width), nn.Linear(width, 4, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.two(self.one(ids).sin())


class Tied(nn.Module):
    """ids (B, 3) -> (B, 3, V), by one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(V, width), nn.Linear(width, V, bias=False)
        self.two.weight = self.one.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.two(F.layer_norm(self.one(ids), self.one.weight.shape[1:]))


def weight(strategy: str, height: int, width: int, **options: Any) -> Callable[[int, bool], tuple[Cost, Sizes]]:
    """The cost of a weight, given the ranks and whether the batch is sharded."""

    def cost(world: int, sharded: bool) -> tuple[Cost, Sizes]:
        return weight_cost(strategy, batch_sharded=sharded), Sizes(ROWS, world, height, width, e=8, **options)

    return cost


def site(
    op: str,
    strategy: str,
    height: int,
    width: int,
    *,
    gradient: bool = True,
    from_columns: bool = False,
    to_columns: bool = False,
    **options: Any,
) -> Callable[[int, bool], tuple[Cost, Sizes]]:
    """The cost of a site."""

    def cost(world: int, sharded: bool) -> tuple[Cost, Sizes]:
        return (
            site_cost(
                op,
                strategy,
                batch_sharded=sharded,
                gradient=gradient,
                from_columns=from_columns,
                to_columns=to_columns,
            ),
            Sizes(ROWS, world, height, width, e=8, **options),
        )

    return cost


@dataclass(frozen=True)
class Case:
    build: Callable[[int], nn.Module]
    plan: dict[str, Any]
    costs: Callable[[int], list[Callable[[int, bool], tuple[Cost, Sizes]]]]


def _of_table(build: type[nn.Module], op: str, **options: Any) -> dict[str, Case]:
    kinds: dict[str, tuple[Any, int]] = {
        COLWISE: (COLWISE, 1),
        REPLICATE: (REPLICATE, 1),
        "one owner": (Colwise((1,)), 1),
        "two owners": (Colwise((0, 2)), 2),
    }
    made = {}
    for name, (want, owners) in kinds.items():
        strategy = OWNED if isinstance(want, Colwise) else want

        def costs(width: int, strategy: str = strategy, owners: int = owners) -> list[Any]:
            return [
                site(op, strategy, V, width, k=owners, **options),
                weight(strategy, V, width, k=owners),
            ]

        made[f"{build.__name__} {name}"] = Case(build, {"table.weight": want}, costs)
    return made


def _twice(width: int) -> list[Any]:
    one = [site(EMBEDDING_BAG, COLWISE, V, width, L=3, m=2), weight(COLWISE, V, width)]
    return one + one


def _dense(strategy: str) -> Callable[[int], list[Any]]:
    return lambda width: [
        site(EMBEDDING, REPLICATE, V, 6, n=3),
        weight(REPLICATE, V, 6),
        site(LINEAR, strategy, 6, width, n=3),
        weight(strategy, 6, width),
        weight(REPLICATE if strategy == ROWWISE else strategy, 1, width),
    ]


def _first(strategy: str) -> Callable[[int], list[Any]]:
    return lambda width: [
        site(LINEAR, strategy, 3, width, gradient=False),
        weight(strategy, 3, width),
        weight(strategy, 1, width),
    ]


def _pair(width: int) -> list[Any]:
    return [
        site(LINEAR, COLWISE, 3, width, gradient=False, to_columns=True),
        weight(COLWISE, 3, width),
        weight(COLWISE, 1, width),
        site(LINEAR, ROWWISE, width, 4, from_columns=True),
        weight(ROWWISE, width, 4),
        weight(REPLICATE, 1, 4),
    ]


def _projected(width: int) -> list[Any]:
    return [
        site(EMBEDDING, COLWISE, V, width, n=3, to_columns=True),
        weight(COLWISE, V, width),
        site(LINEAR, ROWWISE, width, 4, n=3, from_columns=True),
        weight(ROWWISE, width, 4),
    ]


def _tied(width: int) -> list[Any]:
    return [
        site(EMBEDDING, COLWISE, V, width, n=3),
        site(LINEAR, ROWWISE, width, V, n=3),
        weight(COLWISE, V, width),
    ]


CASES = {
    **_of_table(Bag, EMBEDDING_BAG, L=3),
    **_of_table(WeightedBags, EMBEDDING_BAG, L=2, o=1, q=8),
    **_of_table(Lookup, EMBEDDING, n=3),
    "tables of the same ids": Case(Twice, {"*": COLWISE}, _twice),
    **{f"linear {s}": Case(Dense, {"linear.*": s}, _dense(s)) for s in (COLWISE, REPLICATE, ROWWISE)},
    **{f"first linear {s}": Case(First, {"*": s}, _first(s)) for s in (COLWISE, REPLICATE)},
    "pair": Case(Pair, {"one.*": COLWISE, "two.*": ROWWISE}, _pair),
    "table and linear": Case(Projected, {"one.*": COLWISE, "two.*": ROWWISE}, _projected),
    "tied": Case(Tied, {"*": COLWISE}, _tied),
}
QUICK = ("Bag colwise", "pair")
Bytes = dict[tuple[str, str], float]


def predicted(name: str, width: int, world: int, batch_sharded: bool) -> Bytes:
    found: Counter[tuple[str, str]] = Counter()
    for make in CASES[name].costs(width):
        cost, sizes = make(world, batch_sharded)
        for item in cost.traffic:
            numbers = evaluate(Cost((item,)), sizes)
            found[item.direction, item.collective] += numbers.wire[COLLECTIVES.index(item.collective)]
    return {key: value for key, value in found.items() if value}


def counted(mesh: DeviceMesh, name: str, width: int, batch_sharded: bool) -> Bytes:
    """What leaves this rank in a compiled step."""
    case = CASES[name]
    mesh, counter = counting_mesh(mesh)
    generator = torch.Generator().manual_seed(mesh.get_local_rank() if batch_sharded else 0)
    ids = torch.randint(0, V, (ROWS, 3), generator=generator)
    placement = Shard(0) if batch_sharded else Replicate()
    model = autoshard(case.build(width).double(), mesh, case.plan, example_inputs=(ids,), input_placement=placement)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    found: Counter[tuple[str, str]] = Counter()
    with counter.counting() as calls:
        out = run(ids)
    found.update(_sums(FORWARD, calls))
    with counter.counting() as calls:
        out.sum().backward()
    found.update(_sums(BACKWARD, calls))
    return dict(found)


def _sums(direction: str, calls: list[Any]) -> Counter[tuple[str, str]]:
    sums: Counter[tuple[str, str]] = Counter()
    for call in calls:
        sums[direction, call.kind] += call.bytes_sent
    return sums


def require_equal(pool: Pool, name: str, width: int, world_size: int, batch_sharded: bool) -> None:
    ranks = pool.run(counted, name, width, batch_sharded, world_size=world_size, fresh_dynamo=True, timeout=180)
    seen: Counter[tuple[str, str]] = Counter()
    for own in ranks:
        seen.update(own)
    expected = predicted(name, width, world_size, batch_sharded)
    assert expected == pytest.approx({key: value for key, value in seen.items() if value}, abs=1e-6)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_bytes_of_a_strategy_are_those_on_the_wire(pool: Pool, name: str) -> None:
    require_equal(pool, name, 7, 3, batch_sharded=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_with_fewer_columns_than_ranks(pool: Pool, name: str) -> None:
    require_equal(pool, name, 3, 4, batch_sharded=True)


@pytest.mark.parametrize(
    "name",
    [n if n == "pair" else pytest.param(n, marks=pytest.mark.slow) for n in CASES if "owner" not in n],
)
def test_with_replicated_inputs(pool: Pool, name: str) -> None:
    require_equal(pool, name, 7, 3, batch_sharded=False)


class Front(nn.Module):
    """ids (T, B, L) -> (B, T*D)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(V, 7, mode="sum") for _ in range(5))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([table(ids[number]) for number, table in enumerate(self.tables)], 1)


def front(mesh: DeviceMesh) -> dict[str, tuple[int, float]]:
    """(collectives, bytes that leave this rank) of the merged graph, forward and backward."""
    mesh, counter = counting_mesh(mesh)
    ids = torch.randint(0, V, (5, ROWS, 3))
    run = torch.compile(autoshard(Front(), mesh, "colwise"), backend="aot_eager", fullgraph=True)
    with counter.counting() as forward:
        out = run(ids)
    with counter.counting() as backward:
        out.sum().backward()
    found = {FORWARD: forward, BACKWARD: backward}
    return {direction: (len(calls), sum(call.bytes_sent for call in calls)) for direction, calls in found.items()}


def test_merged_lookups_put_the_lower_bound_on_the_wire(pool: Pool) -> None:
    ranks = pool.run(front, world_size=3, fresh_dynamo=True, timeout=180)
    sizes = {"B": ROWS, "W": 3, "k": 3, "n": 1, "L": 3, "D": 7, "e": 4}
    for direction, collectives in ((FORWARD, 2), (BACKWARD, 1)):
        bound = colwise_lower_bound(direction)
        value = bound.subs({symbol: sizes[symbol.name] for symbol in bound.free_symbols})
        assert {rank[direction][0] for rank in ranks} == {collectives}
        assert sum(rank[direction][1] for rank in ranks) == 5 * int(value)


def test_colwise_over_all_ranks_is_the_lower_bound_of_its_lookups() -> None:
    for direction in (FORWARD, BACKWARD):
        made = [t.bytes for t in site_cost(EMBEDDING_BAG, COLWISE).traffic if t.direction == direction]
        bound = colwise_lower_bound(direction)
        names = {symbol.name: symbol for symbol in sympy.Add(*made).free_symbols}
        plain = {names[name]: value for name, value in (("o", 0), ("q", 0), ("m", 1), ("i", 4)) if name in names}
        ranks = {symbol: names["W"] for symbol in bound.free_symbols if symbol.name == "k"}
        assert sympy.expand(sympy.Add(*made).subs(plain) - bound.subs(ranks)) == 0


@pytest.mark.parametrize("op", [EMBEDDING, EMBEDDING_BAG, LINEAR])
def test_one_rank_puts_nothing_on_the_wire(op: str) -> None:
    for strategy in (COLWISE, REPLICATE):
        for cost in (site_cost(op, strategy), weight_cost(strategy)):
            assert evaluate(cost, Sizes(8, 1, 100, 6)).wire == (0, 0, 0, 0)


def test_memory_is_that_of_the_widest_shard_with_gradient_and_states() -> None:
    sizes = Sizes(8, 3, 10, 7, k=2, s=2)
    held = {REPLICATE: 70, COLWISE: 30, OWNED: 40, ROWWISE: 28}
    for strategy, elements in held.items():
        assert evaluate(weight_cost(strategy), sizes).memory == 4 * 4 * elements
        assert evaluate(weight_cost(strategy, trained=False), sizes).memory == 4 * elements


def test_a_product_has_two_flops_per_weight_and_row_in_each_of_three_products() -> None:
    sizes = Sizes(B=8, W=2, V=10, D=6, n=3)
    whole = evaluate(site_cost(LINEAR, REPLICATE), sizes)
    assert whole.flops == 3 * 2 * 8 * 3 * 10 * 6
    assert evaluate(site_cost(LINEAR, COLWISE), sizes).flops == whole.flops
    assert evaluate(site_cost(LINEAR, ROWWISE), sizes).flops == whole.flops
    assert evaluate(site_cost(LINEAR, REPLICATE, gradient=False, trained=False), sizes).flops == whole.flops / 3
