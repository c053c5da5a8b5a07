"""Column-wise work: ops of which each column of the result depends on the same column of the operands alone.

Such an op may run on this rank's columns of a value as well as on the whole. What is not in the tables here is none:
softmax, norms, reshapes, whatever takes a second tensor of all columns.

    pointwise     relu, gelu, clamp, ...; also pow, mul, ... with numbers
    arithmetic    add, sub, mul, ... of two values of one layout
    casts         to(dtype), float(), contiguous(), detach(): the result may be the operand itself
    dropout       draws random numbers, so that those of the ranks have to differ
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from passes.schedule import layer_of, may_write
from passes.sites import has_hooks

_POINTWISE = frozenset(
    "relu relu6 gelu silu mish tanh sigmoid elu selu celu leaky_relu hardtanh hardswish hardsigmoid softplus softsign "
    "logsigmoid log_sigmoid tanhshrink softshrink hardshrink threshold abs neg exp expm1 exp2 log log1p log2 log10 "
    "sqrt rsqrt square reciprocal sin cos erf erfc sign clamp clamp_min clamp_max clip nan_to_num".split()
)
_ARITHMETIC = frozenset("add sub rsub mul div true_divide subtract multiply divide pow maximum minimum".split())
_CASTS = frozenset("to _to_copy type float double half bfloat16".split())
_COPIES = frozenset("contiguous clone detach alias".split())
_DROPOUT = frozenset({"dropout"})
_NAMES = _POINTWISE | _ARITHMETIC | _CASTS | _COPIES | _DROPOUT
_MAY_BE_THE_OPERAND = _CASTS | {"contiguous", "detach", "alias"} | _DROPOUT

_OPERATORS: dict[Callable[..., Any], str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.pow: "pow",
    operator.neg: "neg",
    operator.iadd: "add",
    operator.isub: "sub",
    operator.imul: "mul",
    operator.itruediv: "div",
}
_FUNCTIONS: dict[Callable[..., Any], str] = {
    getattr(place, spelling): name
    for name in _POINTWISE | _ARITHMETIC | _DROPOUT | {"clone", "detach"}
    for place in (torch, F)
    for spelling in (name, f"{name}_")
    if hasattr(place, spelling)
} | _OPERATORS
_LAYERS: dict[type[nn.Module], str] = {
    **dict.fromkeys(
        (
            nn.ReLU,
            nn.ReLU6,
            nn.GELU,
            nn.SiLU,
            nn.Mish,
            nn.Tanh,
            nn.Sigmoid,
            nn.ELU,
            nn.SELU,
            nn.CELU,
            nn.LeakyReLU,
            nn.Hardtanh,
            nn.Hardswish,
            nn.Hardsigmoid,
            nn.Softplus,
            nn.Softsign,
            nn.LogSigmoid,
            nn.Tanhshrink,
            nn.Softshrink,
            nn.Hardshrink,
            nn.Threshold,
        ),
        "relu",
    ),
    nn.Identity: "alias",
    nn.Dropout: "dropout",
}


@dataclasses.dataclass(frozen=True)
class ColumnWork:
    """What a node that works on every column by itself takes.

    Attributes:
        operands: the nodes that must be of one layout, the one that is written into first.
        writes: True if it writes into its first operand.
        aliases: True if its result may be its first operand.
        random: True if it draws random numbers.
    """

    operands: tuple[fx.Node, ...]
    writes: bool
    aliases: bool
    random: bool


def column_work(node: fx.Node) -> ColumnWork | None:
    """The node as column-wise work, None if it is none."""
    name = _name(node)
    operands = tuple(node.all_input_nodes)
    if name is None or not operands or "out" in node.kwargs:
        return None
    first = node.args[0] if node.args else node.kwargs.get("input")
    if name not in _ARITHMETIC and (len(operands) != 1 or first is not operands[0]):
        return None
    options = [a for a in (*node.args, *node.kwargs.values()) if not isinstance(a, fx.Node)]
    if not all(_is_option(name, option) for option in options):
        return None
    writes = may_write(node)
    if writes and first is not operands[0]:
        return None
    return ColumnWork(operands, writes, writes or name in _MAY_BE_THE_OPERAND, name in _DROPOUT and _draws(node))


def _name(node: fx.Node) -> str | None:
    """The name of the op, whatever its spelling, None if it is in no table."""
    target: Any = node.target
    if node.op == "call_module":
        layer = layer_of(node)
        return None if has_hooks(layer) else _LAYERS.get(type(layer))
    if node.op == "call_method":
        name = target.removesuffix("_")
    elif isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        name = target._schema.name.removeprefix("aten::").removesuffix("_")
    elif node.op == "call_function":
        name = _FUNCTIONS.get(target, "")
    else:
        return None
    return name if name in _NAMES else None


def _is_option(name: str, value: Any) -> bool:
    """True for an argument that is the same for every column and leaves the shape alone."""
    if name in _CASTS:
        return value is None or isinstance(value, (torch.dtype, bool))
    return name not in _COPIES and (value is None or isinstance(value, (bool, int, float, str)))


def _draws(node: fx.Node) -> bool:
    """False for a dropout that the graph says is of evaluation."""
    flags = [node.kwargs.get("training"), node.kwargs.get("train"), *node.args[2:3]]
    return not any(flag is False for flag in flags)
