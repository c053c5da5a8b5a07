"""What one step costs, by site and strategy: bytes on the wire, flops, bytes through memory, bytes of memory.

Strategies of a weight, over W ranks:

    replicate   whole on every rank, its gradient reduced
    colwise     the feature axis over all ranks
    owned       the feature axis of a table over k ranks, to which ids are sent (`Colwise(ranks)`)
    rowwise     the input axis of a linear over all ranks

What the columns of one layer become as they are the input of a rowwise linear (`passes.column_flow`) is `kept`: neither
is the result of the first put together, nor that of the second taken apart.

Every cost is an expression in these symbols. Bytes on the wire are those of the formulas that the rewrites themselves
note (`passes.wire`), so they are what a counting process group sees; the rest counts what the kernels have to touch.

    B  rows of the batch on one rank              W  ranks                k  ranks that hold columns
    V  rows of a table, input features            D  columns of a table, output features
    n  results for each row of the batch          L  ids in a bag         o  offsets for each result
    e  bytes of a weight, i of an id that travels, q of a weight per sample (0: none)
    m  sites that share one gathered input        s  optimizer states per weight     c  bytes of a memory line

Lower bound for colwise lookups, batch-sharded. Every rank with columns of a table needs the ids of all W ranks, of
which it has its own: with k such ranks k * (W - 1) * B * n * L ids travel, and no torch dtype below int32 (4 bytes)
holds the ids of a table of more than 32,767 rows. Every rank needs all D columns of its B * n results; rank r computes
d(r) of them itself, so B * n * e * (D - d(r)) bytes come to it; as the d(r) add up to D, over all ranks that is
(W - 1) * B * n * D * e, whatever the layout. The gradient of the results goes back by the same count.

    forward    4 * k * (W - 1) * B * n * L  +  (W - 1) * B * n * D * e
    backward                                   (W - 1) * B * n * D * e

A table with columns on all ranks (k = W) meets it with one all_gather and one all_to_all; a table on some of the ranks
with two all_to_alls.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import sympy

from passes import wire
from passes.plan import COLWISE, REPLICATE, ROWWISE
from passes.sites import EMBEDDING_BAG, LINEAR
from passes.traffic import B, Traffic, W, traffic

OWNED = "owned"


def _size(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


K, V, D, N, L, E, ID, M, C = (_size(name) for name in "k V D n L e i m c".split())
OFFSETS, Q, S = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "o q s".split())
ID_BYTES = 4
_ZERO = sympy.Integer(0)


@dataclasses.dataclass(frozen=True)
class Work:
    """What the busiest rank does in one direction.

    Attributes:
        flops: floating point operations.
        moved: bytes read and written one after the other.
        looked_up: bytes read and written row by row, at random places.
    """

    flops: sympy.Expr = _ZERO
    moved: sympy.Expr = _ZERO
    looked_up: sympy.Expr = _ZERO

    def __add__(self, other: Work) -> Work:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Work(*(one + two for one, two in pairs))


@dataclasses.dataclass(frozen=True, eq=False)
class Cost:
    """What a site, or a weight, costs in one step. Each is made once: it is equal to itself only.

    Attributes:
        traffic: its collectives, forward and backward; bytes of all ranks together.
        forward: work of the busiest rank.
        backward: work of the busiest rank; that of a weight is the optimizer's step.
        memory: bytes on the busiest rank: weights, gradients, optimizer states.
    """

    traffic: tuple[Traffic, ...]
    forward: Work = Work()
    backward: Work = Work()
    memory: sympy.Expr = _ZERO


def colwise_lower_bound(direction: str) -> sympy.Expr:
    """The fewest bytes on the wire for a lookup by column, all ranks together; the module derives it."""
    results = (W - 1) * B * N * D * E
    return ID_BYTES * K * (W - 1) * B * N * L + results if direction == "forward" else results


@functools.cache
def site_cost(
    op: str,
    strategy: str,
    *,
    batch_sharded: bool = True,
    gradient: bool = True,
    trained: bool = True,
    from_columns: bool = False,
    to_columns: bool = False,
) -> Cost:
    """The cost of one use of a weight, without what is paid once for the weight.

    Args:
        op: "embedding", "embedding_bag" or "linear".
        strategy: of the weight.
        batch_sharded: True if each rank has its own rows.
        gradient: True if a gradient goes back to the input of a linear.
        trained: True if one goes to the weight.
        from_columns: the input of a rowwise linear is kept by column.
        to_columns: the result of a colwise layer is.
    """
    if op == LINEAR:
        return _linear(strategy, batch_sharded, gradient, trained, from_columns, to_columns)
    return _lookup(op, strategy, batch_sharded, trained, to_columns)


@functools.cache
def weight_cost(strategy: str, *, batch_sharded: bool = True, trained: bool = True) -> Cost:
    """What is paid once for a weight of (V, D), or a bias with V = 1: memory, its gradient's all_reduce, its update.

    The update reads weights, gradients and states and writes weights and states; the gradient is written once before.
    """
    held = {
        REPLICATE: V * D,
        COLWISE: V * sympy.ceiling(D / W),
        OWNED: V * sympy.ceiling(D / K),
        ROWWISE: sympy.ceiling(V / W) * D,
    }[strategy]
    if not trained:
        return Cost((), memory=held * E)
    moves = wire.reduced(V * D * E, batch_sharded=batch_sharded) if strategy == REPLICATE else []
    update = Work(flops=2 * (1 + S) * held, moved=(4 + 2 * S) * held * E)
    return Cost(_traffic(moves), backward=update, memory=(2 + S) * held * E)


def _lookup(op: str, strategy: str, batch_sharded: bool, trained: bool, to_columns: bool) -> Cost:
    moves: list[wire.Move] = []
    ids, weights = B * N * (L + OFFSETS) * ID / M, B * N * L * Q
    if strategy == OWNED:
        moves += [*wire.sent(ids * M, K), *wire.sent(weights, K)]
    elif strategy == COLWISE and batch_sharded:
        for nbytes in (ids, weights):
            moves += wire.gathered(nbytes, batch_sharded=True, gradient=False)
    whole = strategy == REPLICATE
    if not (whole or to_columns):
        moves += wire.spread(B * N, D, (E, E), batch_sharded=batch_sharded, gradient=trained)
    width = D if whole else sympy.ceiling(D / (K if strategy == OWNED else W))
    rows = B * N if whole or not batch_sharded else W * B * N
    line = sympy.Max(width * E, C)
    pooled = rows * L * width if op == EMBEDDING_BAG else _ZERO
    put_together = _ZERO if whole or to_columns else 2 * (rows * width + B * N * D) * E
    forward = Work(pooled, rows * width * E + rows * L * ID + put_together, rows * L * line)
    backward = Work(rows * L * width, rows * width * E + put_together, 2 * rows * L * line) if trained else Work()
    return Cost(_traffic(moves), forward, backward)


def _linear(
    strategy: str, batch_sharded: bool, gradient: bool, trained: bool, from_columns: bool, to_columns: bool
) -> Cost:
    moves: list[wire.Move] = []
    rows, taken, made, copied = B * N * (W if batch_sharded else 1), V, D, _ZERO
    if strategy == REPLICATE:
        rows = B * N
    elif strategy == COLWISE:
        made = sympy.ceiling(D / W)
        moves += wire.gathered(B * N * V * E / M, batch_sharded=batch_sharded, gradient=gradient)
        if not to_columns:
            moves += wire.spread(B * N, D, (E, E), batch_sharded=batch_sharded, gradient=trained or gradient)
            copied = 2 * (rows * made + B * N * D) * E
    else:
        taken = sympy.ceiling(V / W)
        if not from_columns:
            moves += wire.own_columns(B * N / M, V, E, batch_sharded=batch_sharded, gradient=gradient)
            copied = 2 * (rows * taken + B * N * V) * E
        moves += wire.summed(B * N * D * E, batch_sharded=batch_sharded)
    product = Work(2 * rows * taken * made, (taken * made + rows * taken + rows * made) * E)
    forward, backward = product + Work(moved=copied), Work()
    for wanted in (gradient, trained):
        backward = backward + product if wanted else backward
    return Cost(_traffic(moves), forward, backward + Work(moved=copied if gradient or trained else _ZERO))


def _traffic(moves: list[wire.Move]) -> tuple[Traffic, ...]:
    return tuple(traffic(*move) for move in moves)


_SYMBOLS = (B, W, K, V, D, N, L, OFFSETS, E, ID, Q, M, S, C)
COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Numbers for the symbols, by their names."""

    B: int
    W: int
    V: int
    D: int
    k: int = 1
    n: float = 1
    L: float = 1
    o: int = 0
    e: int = 4
    i: int = ID_BYTES
    q: int = 0
    m: int = 1
    s: int = 0
    c: int = 1


_NAMES = tuple(field.name for field in dataclasses.fields(Sizes))


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A cost in numbers; bytes on the wire are of all ranks together, in the order of `COLLECTIVES`."""

    wire: tuple[float, float, float, float]
    flops: float
    moved: float
    looked_up: float
    memory: float


def evaluate(cost: Cost, sizes: Sizes) -> Numbers:
    """The numbers of a cost from `site_cost` or `weight_cost`."""
    found = _function(cost)(*(getattr(sizes, name) for name in _NAMES))
    return Numbers((found[0], found[1], found[2], found[3]), *found[4:])


@functools.cache
def _function(cost: Cost) -> Any:
    work = cost.forward + cost.backward
    onwire = [
        sympy.Add(*(item.bytes for item in cost.traffic if item.collective == collective)) for collective in COLLECTIVES
    ]
    by_name = {symbol.name: symbol for symbol in _SYMBOLS}
    return sympy.lambdify(
        [by_name[name] for name in _NAMES], [*onwire, work.flops, work.moved, work.looked_up, cost.memory], "math"
    )
