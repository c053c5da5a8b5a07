"""Finding: which nodes of a graph are an embedding, an embedding_bag or a linear, and which parameters they use.

One matcher knows every spelling. What it finds is either a `Call`, which points into the graph (for the passes that
edit it), or a `Site`, which is plain data (for plans and reports). Finding changes nothing.

A weight is found through the graph's nesting: inside of a nested graph module (an activation checkpoint, a grad-mode
region) it is a placeholder, which stands for the argument that the outer graph hands in.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from passes.origin import module_path, source_line

EMBEDDING = "embedding"
EMBEDDING_BAG = "embedding_bag"
LINEAR = "linear"

_BAG_MODES = ("sum", "mean", "max")


@dataclasses.dataclass(frozen=True)
class Site:
    """One use of a weight by an embedding, embedding_bag or linear node.

    `graph` is the path of the traced module that holds the node, `module` the path of the layer that made it, `where`
    its source line. `weight` and `bias` are parameter names of the whole model; several weights may share one site's
    bias.
    """

    op: str
    graph: str
    node: str
    module: str
    where: str
    weight: str
    bias: str | None
    options: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class OtherUse:
    """A use of a parameter by a node that is no site."""

    parameter: str
    graph: str
    node: str
    op: str
    where: str


@dataclasses.dataclass(frozen=True)
class Call:
    """A site inside of its graph: the node, its operands, and its options with the defaults filled in.

    `result` is the node that holds the layer's output: `node`, or the first item of a node that returns a tuple.
    """

    op: str
    node: fx.Node
    result: fx.Node
    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    options: Mapping[str, Any]


# For each spelling: the op, and the names of its positional arguments.
_EMBEDDING_ATEN = ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse")
_BAG_ATEN = (
    "weight",
    "input",
    "offsets",
    "scale_grad_by_freq",
    "mode",
    "sparse",
    "per_sample_weights",
    "include_last_offset",
    "padding_idx",
)
_EMBEDDING_F = (
    "input",
    "weight",
    "padding_idx",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "sparse",
)
_BAG_F = (
    "input",
    "weight",
    "offsets",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "mode",
    "sparse",
    "per_sample_weights",
    "include_last_offset",
    "padding_idx",
)
_LINEAR = ("input", "weight", "bias")

_SPELLINGS: dict[Callable[..., Any], tuple[str, tuple[str, ...]]] = {
    F.embedding: (EMBEDDING, _EMBEDDING_F),
    F.embedding_bag: (EMBEDDING_BAG, _BAG_F),
    F.linear: (LINEAR, _LINEAR),
    torch.embedding: (EMBEDDING, _EMBEDDING_ATEN),
    torch.embedding_bag: (EMBEDDING_BAG, _BAG_ATEN),
    torch.ops.aten.embedding.default: (EMBEDDING, _EMBEDDING_ATEN),
    torch.ops.aten.embedding_bag.default: (EMBEDDING_BAG, _BAG_ATEN),
    torch.ops.aten.embedding_bag.padding_idx: (EMBEDDING_BAG, _BAG_ATEN),
    torch.ops.aten._embedding_bag.default: (EMBEDDING_BAG, _BAG_ATEN),
    torch.ops.aten.linear.default: (LINEAR, _LINEAR),
}
_RETURNS_TUPLE = frozenset(
    target for target, (op, names) in _SPELLINGS.items() if op == EMBEDDING_BAG and names is _BAG_ATEN
)
_DEFAULTS: dict[str, dict[str, Any]] = {
    EMBEDDING: {
        "padding_idx": None,
        "max_norm": None,
        "norm_type": 2.0,
        "scale_grad_by_freq": False,
        "sparse": False,
    },
    EMBEDDING_BAG: {
        "offsets": None,
        "max_norm": None,
        "norm_type": 2.0,
        "scale_grad_by_freq": False,
        "mode": "mean",
        "sparse": False,
        "per_sample_weights": None,
        "include_last_offset": False,
        "padding_idx": None,
    },
    LINEAR: {},
}
# The options of a layer module that its function takes under the same name.
LAYER_TYPES: dict[type[nn.Module], str] = {
    nn.Embedding: EMBEDDING,
    nn.EmbeddingBag: EMBEDDING_BAG,
    nn.Linear: LINEAR,
}


# Operators that run the nested graph they are handed, once and on every rank. Others (a condition, a loop) may run it
# on some ranks only, whose collectives would then wait for the others': what is inside of them is no site.
_TRANSPARENT = frozenset(
    getattr(torch.ops.higher_order, name)
    for name in (
        "wrap_with_set_grad_enabled",
        "wrap_with_autocast",
        "wrap_activation_checkpoint",
        "tag_activation_checkpoint",
        "invoke_subgraph",
    )
    if hasattr(torch.ops.higher_order, name)
)


@dataclasses.dataclass(frozen=True)
class Scope:
    """A graph module, possibly nested, and the parameter names behind its nodes."""

    graph_module: fx.GraphModule
    path: str
    prefix: str
    parameters: Mapping[fx.Node, str]

    def module_of(self, node: fx.Node) -> str:
        """The path in the whole model of the innermost module whose forward made the node."""
        inner = module_path(node)
        return f"{self.prefix}.{inner}" if self.prefix and inner else self.prefix or inner


def scopes(graph_module: fx.GraphModule, prefix: str = "", path: str = "") -> Iterator[Scope]:
    """The graph module and all graph modules nested in it.

    Args:
        graph_module: a traced module.
        prefix: path of that module in the whole model; parameter names are given with it.
        path: name of the graph in reports; `prefix` if empty.
    """
    yield from _scopes(graph_module, prefix, path or prefix, {})


def _scopes(graph_module: fx.GraphModule, prefix: str, path: str, outer: Mapping[fx.Node, str]) -> Iterator[Scope]:
    parameters = dict(outer)
    names = {id(p): name for name, p in graph_module.named_parameters(remove_duplicate=True)}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = _attribute(graph_module, node.target)
        if isinstance(value, nn.Parameter) and id(value) in names:
            parameters[node] = f"{prefix}.{node.target}" if prefix else str(node.target)
    yield Scope(graph_module, path, prefix, parameters)
    for node, nested, arguments in _nested_calls(graph_module):
        placeholders = nested.graph.find_nodes(op="placeholder")
        bound = {
            placeholder: parameters[argument]
            for placeholder, argument in zip(placeholders, arguments, strict=False)
            if isinstance(argument, fx.Node) and argument in parameters
        }
        name = str(node.target)
        inside = prefix
        if node.op == "call_module":  # its parameters are its own, below its name
            inside = f"{prefix}.{name}" if prefix else name
        yield from _scopes(nested, inside, f"{path}.{name}" if path else name, bound)


def _nested_calls(
    graph_module: fx.GraphModule,
) -> Iterator[tuple[fx.Node, fx.GraphModule, tuple[Any, ...]]]:
    """Every nested graph module with the arguments that it is called with."""
    for node in graph_module.graph.nodes:
        if node.op == "call_module":
            module = graph_module.get_submodule(node.target)
            if isinstance(module, fx.GraphModule):
                yield node, module, node.args
        elif node.op == "get_attr":
            module = _attribute(graph_module, node.target)
            if isinstance(module, fx.GraphModule):
                for user in node.users:
                    if user.target not in _TRANSPARENT:
                        continue
                    position = user.args.index(node) if node in user.args else -1
                    rest = [a for a in user.args[position + 1 :] if not isinstance(a, bool)]
                    operands = rest[0] if rest and isinstance(rest[0], (tuple, list)) else rest
                    yield node, module, tuple(operands)


def match(node: fx.Node) -> Call | None:
    """The node as a `Call`, whatever its spelling, or None if it is no embedding, embedding_bag or linear."""
    if node.op != "call_function" or node.target not in _SPELLINGS:
        return None
    op, names = _SPELLINGS[node.target]
    bound = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if "indices" in bound:
        bound["input"] = bound.pop("indices")
    if node.target is F.embedding_bag and _is_swapped(bound):
        bound["input"], bound["weight"] = bound["weight"], bound["input"]
    operands = bound.pop("input"), bound.pop("weight"), bound.pop("bias", None)
    if not all(isinstance(operand, fx.Node) for operand in operands[:2]):
        return None
    options = _DEFAULTS[op] | bound
    if names is _BAG_ATEN:
        options["mode"] = _BAG_MODES[int(str(bound.get("mode", 0)))]
    if names in (_EMBEDDING_ATEN, _BAG_ATEN) and options["padding_idx"] == -1:
        options["padding_idx"] = None
    result = node
    if node.target in _RETURNS_TUPLE:
        firsts = [u for u in node.users if u.target is operator.getitem and u.args[1] == 0]
        if len(firsts) != 1 or any(user.users for user in node.users if user is not firsts[0]):
            return None
        result = firsts[0]
    return Call(op, node, result, *operands, options)  # type: ignore[arg-type]  # nodes, as tested above


def _is_swapped(bound: Mapping[str, Any]) -> bool:
    """`F.embedding_bag(weight, ids)`, the argument order of old torch, which torch still accepts; told by dtypes."""
    values = [_value(bound.get(name)) for name in ("input", "weight")]
    return all(v is not None for v in values) and values[0].is_floating_point() and not values[1].is_floating_point()


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else None


def calls(scope: Scope) -> Iterator[Call]:
    """The calls of one graph whose weight is a parameter of the model, in the order of the graph."""
    for node in list(scope.graph_module.graph.nodes):
        call = match(node)
        if call is not None and call.weight in scope.parameters:
            yield call


def find_sites(graph_module: fx.GraphModule, prefix: str = "") -> tuple[Site, ...]:
    """All sites of a traced module, nested graphs included, in the order of its graphs.

    Args:
        graph_module: a traced module.
        prefix: path of that module in the whole model.
    """
    return tuple(
        site
        for scope in scopes(graph_module, prefix)
        for node in scope.graph_module.graph.nodes
        if (site := _site_of(node, scope)) is not None
    )


def _site_of(node: fx.Node, scope: Scope) -> Site | None:
    if node.op == "call_module":
        return _layer_site(node, scope)
    call = match(node)
    if call is None or call.weight not in scope.parameters:
        return None
    return _site(call, scope)


def _layer_site(node: fx.Node, scope: Scope) -> Site | None:
    """The site of a layer that stands in the graph as a module."""
    layer = scope.graph_module.get_submodule(str(node.target))
    op = plain_layer(layer)
    if op is None:
        return None
    path = f"{scope.prefix}.{node.target}" if scope.prefix else str(node.target)
    options = {name: getattr(layer, name) for name in _DEFAULTS[op] if hasattr(layer, name)}
    return Site(
        op=op,
        graph=scope.path,
        node=node.name,
        module=path,
        where=source_line(node),
        weight=f"{path}.weight",
        bias=f"{path}.bias" if getattr(layer, "bias", None) is not None else None,
        options=_unusual(op, options),
    )


def _site(call: Call, scope: Scope) -> Site:
    return Site(
        op=call.op,
        graph=scope.path,
        node=call.node.name,
        module=scope.module_of(call.node),
        where=source_line(call.node),
        weight=scope.parameters[call.weight],
        bias=None if call.bias is None else scope.parameters.get(call.bias),
        options=_unusual(call.op, call.options),
    )


def _unusual(op: str, options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The options that differ from their defaults, operands left out."""
    return tuple(
        (name, value)
        for name, value in options.items()
        if not isinstance(value, fx.Node) and value != _DEFAULTS[op][name]
    )


def find_other_uses(graph_module: fx.GraphModule, prefix: str = "") -> tuple[OtherUse, ...]:
    """All uses of parameters that are no site's weight or bias."""
    found = []
    for scope in scopes(graph_module, prefix):
        by_node = {call.node: call for call in calls(scope)}
        nested = nested_call_users(scope.graph_module)
        for node, parameter in scope.parameters.items():
            for user in node.users:
                call = by_node.get(user)
                if user not in nested and not (call is not None and _only_as_weight(node, call)):
                    found.append(OtherUse(parameter, scope.path, user.name, _target_name(user), source_line(user)))
    return tuple(found)


def _only_as_weight(node: fx.Node, call: Call) -> bool:
    """True if the call takes the node as its weight or bias, and as nothing else."""
    others = (call.input, *call.options.values())
    return node in (call.weight, call.bias) and not any(node is other for other in others)


def nested_call_users(graph_module: fx.GraphModule) -> frozenset[fx.Node]:
    """The nodes that call nested graphs which are looked into: what they are handed is used inside."""
    found: set[fx.Node] = set()
    for node, _, _ in _nested_calls(graph_module):
        found.update([node] if node.op == "call_module" else (u for u in node.users if u.target in _TRANSPARENT))
    return frozenset(found)


def plain_layer(module: nn.Module) -> str | None:
    """The op that a torch layer is, None for another module or one whose hooks do more than its forward."""
    return None if has_hooks(module) else LAYER_TYPES.get(type(module))


def has_hooks(module: nn.Module) -> bool:
    """True for a module whose call does more than its forward."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _target_name(node: fx.Node) -> str:
    return node.op if node.op == "output" else getattr(node.target, "__name__", str(node.target))


def _attribute(graph_module: nn.Module, target: Any) -> Any:
    value: Any = graph_module
    for name in str(target).split("."):
        value = getattr(value, name, None)
    return value
