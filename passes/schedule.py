"""Moving nodes of a graph earlier, where that changes nothing: so that what could run together stands together."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

import torch
from torch import fx, nn

from passes.ops.renorm import renorm
from passes.sites import has_hooks

_MODE_CHANGES = (
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)
_IN_PLACE = "setitem delitem iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor"
_WRITING_OPERATORS = frozenset(getattr(operator, name) for name in _IN_PLACE.split())
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "poisson", "rrelu", "exponential")
_PURE_LAYERS = ("activation", "flatten", "linear", "loss", "normalization", "padding", "pooling")
_RANDOM_LAYERS = (nn.MultiheadAttention, nn.RReLU)


class Schedule:
    """The order of a graph's nodes. It may be edited in between, but no node that writes may be moved or added."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        nodes = list(graph_module.graph.nodes)
        self._barriers = [node for node in nodes if may_write(node) or node.target in _MODE_CHANGES]
        self._renorms = [node for node in nodes if node.target is renorm]

    def hoist(
        self, member: fx.Node, operands: Iterable[fx.Node], before: fx.Node, members: Collection[fx.Node]
    ) -> bool:
        """Moves what the operands of `member` depend on in front of `before`.

        Args:
            member: a node behind `before`, which is about to take its place.
            operands: what it needs there.
            before: a node.
            members: the nodes that stand together already, `before` among them; none of their results is there yet.

        Returns:
            False, and nothing is moved, if `member` cannot run there.
        """
        if self.is_written_between(before, member):
            return False
        late: set[fx.Node] = set()
        todo = list(operands)
        while todo:
            node = todo.pop()
            if node in members:
                return False
            if before < node and node not in late:
                if not _is_pure(node):
                    return False
                late.add(node)
                todo.extend(node.all_input_nodes)
        moved = sorted(late)
        read = {source for node in moved for source in node.all_input_nodes}
        if any(node.args[0] in read for node in _between(self._renorms, before, member)):
            return False
        for node in moved:
            before.prepend(node)
        return True

    def is_written_between(self, first: fx.Node, second: fx.Node) -> bool:
        """True if a tensor may have another value at the second node than at the first, or be in another mode."""
        return bool(_between(self._barriers, first, second))


def groups(graph_module: fx.GraphModule, kind: Callable[[fx.Node], Hashable | None]) -> list[list[fx.Node]]:
    """The nodes of each kind in groups of two or more that can run together, what they need in front of the first.

    Args:
        graph_module: what the members of a group need is moved in it.
        kind: of a node; None for one that belongs to no group.
    """
    schedule = Schedule(graph_module)
    levels: dict[fx.Node, int] = {}
    made: dict[tuple[Hashable, int], list[list[fx.Node]]] = {}
    for node in list(graph_module.graph.nodes):
        # How many such nodes a node waits for: those that wait for as many do not wait for one another.
        level = max((levels[source] for source in node.all_input_nodes), default=0)
        which = kind(node)
        levels[node] = level + (which is not None)
        if which is None:
            continue
        found = made.setdefault((which, level), [])
        if found and schedule.hoist(node, node.all_input_nodes, found[-1][0], found[-1]):
            found[-1].append(node)
        else:
            found.append([node])
    return [group for found in made.values() for group in found if len(group) > 1]


def _between(nodes: Sequence[fx.Node], first: fx.Node, second: fx.Node) -> Sequence[fx.Node]:
    return nodes[bisect.bisect_right(nodes, first) : bisect.bisect_left(nodes, second)]


def _is_pure(node: fx.Node) -> bool:
    """True for a node that may run earlier: it draws no random numbers and writes nothing."""
    if node.op == "get_attr":
        return True
    if node.op == "call_module":
        return _is_pure_layer(layer_of(node))
    if node.op not in ("call_function", "call_method") or node.target is renorm or may_write(node):
        return False
    return not _is_random(node)


def _is_random(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or any(word in name for word in _RANDOM)


def _is_pure_layer(layer: nn.Module) -> bool:
    """True for a layer that keeps no state and draws no random numbers, too."""
    file = type(layer).__module__.rpartition(".")[2]
    return _is_harmless_layer(layer) and file in _PURE_LAYERS and not isinstance(layer, _RANDOM_LAYERS)


def _is_harmless_layer(layer: nn.Module) -> bool:
    """True for a layer of torch's without hooks, which writes into nothing but its own buffers."""
    of_torch = type(layer).__module__.startswith("torch.nn.modules.")
    return of_torch and not getattr(layer, "inplace", False) and not has_hooks(layer)


def layer_of(node: fx.Node) -> nn.Module:
    """The layer that a call_module node calls."""
    assert node.graph.owning_module is not None
    return node.graph.owning_module.get_submodule(str(node.target))


def may_write(node: fx.Node) -> bool:
    """True for a node that may write into a tensor that another one reads, but for a renorm, which writes a table."""
    if node.op == "call_method":
        return str(node.target).endswith("_")
    if node.op == "call_module":
        return not _is_harmless_layer(layer_of(node))
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = getattr(node.target, "__name__", "")
    return name.endswith("_") or node.target in _WRITING_OPERATORS or _is_inplace(node) or "out" in node.kwargs


def _is_inplace(node: fx.Node) -> bool:
    """True for a call like `F.relu(x, True)` or `F.relu(x, inplace=True)`."""
    code = getattr(node.target, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    if "inplace" in names and names.index("inplace") < len(node.args):
        return node.args[names.index("inplace")] is not False
    return node.kwargs.get("inplace", False) is not False
