"""What a collective puts on the wire, as an expression.

Bytes are those that leave the ranks for one another, added up over all ranks, so that they do not depend on which rank
holds a column more. With W ranks and b bytes going into a collective on each rank:

    all_gather       W * (W - 1) * b        every rank sends its b bytes to every other
    reduce_scatter   (W - 1) * b            every rank sends each other rank that rank's W-th of b
    all_reduce       2 * (W - 1) * b        a reduce_scatter and an all_gather of a W-th each, as a ring does
    all_to_all       (W - 1) * b            where b is the result on one rank: all of it but the rank's own part arrives

Symbols: B rows per rank (the batch), W ranks; a size that is not known is a symbol of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

W = sympy.Symbol("W", integer=True, positive=True)
B = sympy.Symbol("B", integer=True, positive=True)

FORWARD = "forward"
BACKWARD = "backward"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One collective of a step.

    Attributes:
        collective: "all_gather", "all_to_all", "reduce_scatter" or "all_reduce".
        direction: "forward" or "backward".
        bytes: on the wire per step, all ranks together; an expression in W, B and unknown sizes.
    """

    collective: str
    direction: str
    bytes: sympy.Expr


_ON_THE_WIRE = {
    "all_gather": W * (W - 1),
    "reduce_scatter": W - 1,
    "all_reduce": 2 * (W - 1),
    "all_to_all": W - 1,
}


@functools.cache  # sympy is slow, and many tables are of one shape
def traffic(collective: str, direction: str, nbytes: sympy.Expr) -> Traffic:
    """The traffic of a collective of `nbytes`, b in the table above."""
    return Traffic(collective, direction, sympy.expand(_ON_THE_WIRE[collective] * nbytes))


def total(items: Iterable[Traffic], direction: str | None = None) -> sympy.Expr:
    """All bytes of these collectives, or of those in one direction."""
    chosen = (t.bytes for t in items if direction in (None, t.direction))
    return sympy.expand(sum(chosen, sympy.Integer(0)))


def rows_of(node: fx.Node, feature_dims: int = 0) -> sympy.Expr:
    """The number of elements of a node's value, its last `feature_dims` dimensions left out."""
    shape = shape_of(node)
    if shape is None:
        return sympy.Symbol(f"n_{node.name}", integer=True, positive=True)
    return sympy.prod(shape[: len(shape) - feature_dims])


def shape_of(node: fx.Node) -> tuple[sympy.Expr, ...] | None:
    """The shape of a node's value, symbolic sizes as sympy symbols, or None if it is not known."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(_expression(size) for size in value.shape)


def itemsize_of(node: fx.Node, default: torch.dtype) -> int:
    """Bytes of an element of a node's value; of `default` if its dtype is not known."""
    value = node.meta.get("val")
    return value.dtype.itemsize if isinstance(value, torch.Tensor) else default.itemsize


def _expression(size: Any) -> sympy.Expr:
    if isinstance(size, torch.SymInt):
        return sympy.sympify(size.node.expr)
    return sympy.Integer(size)
