"""Where a value goes by column-wise work only: from the ops whose results are columns to the ends that can take them.

    linear ─ relu ─┐
                   ├─ mul ─ linear        one flow: two sources, two nodes of work, one end
    linear ────────┘

A value that anything else uses belongs to no flow, nor does what it is computed from: its rows are needed whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import fx, nn

from passes.column_work import ColumnWork, column_work
from passes.sites import EMBEDDING, LINEAR, Call, Scope, calls, scopes
from passes.traffic import shape_of


@dataclasses.dataclass(frozen=True)
class Layout:
    """Of a value (rows, ..., width) by column.

    Attributes:
        width: columns on all ranks together.
        rows: what the leading dimensions are those of; None if it is not known.
    """

    width: int
    rows: object


@dataclasses.dataclass
class Flow:
    """What hangs together.

    Attributes:
        sources: the nodes of which the columns come, and their layouts.
        work: the nodes in between, in the order of the graph.
        ends: the nodes that take the columns, in that order.
    """

    sources: dict[fx.Node, Layout] = dataclasses.field(default_factory=dict)
    work: dict[fx.Node, ColumnWork] = dataclasses.field(default_factory=dict)
    ends: list[fx.Node] = dataclasses.field(default_factory=list)

    @property
    def layout(self) -> Layout:
        """That of all its values."""
        return next(iter(self.sources.values()))


@dataclasses.dataclass(frozen=True)
class Feed:
    """Linears that are fed by linears and lookups through column-wise work only, by the names of their weights.

    Attributes:
        sources: the weights of those that feed.
        linears: the weights of those that are fed, a weight as often as it is used so.
        width: columns of what goes from one to the other.
    """

    sources: tuple[str, ...]
    linears: tuple[str, ...]
    width: int


def find_feeds(graph_module: fx.GraphModule, parameters: Mapping[str, nn.Parameter], prefix: str = "") -> list[Feed]:
    """For each linear of a normalized graph that is not rewritten: by what it is fed through column-wise work only.

    Args:
        graph_module: a traced module that `normalize` has been over.
        parameters: of the whole model, by name, for widths.
        prefix: path of the traced module in the model.
    """
    feeds = []
    found = [(scope, {call.result: call for call in calls(scope)}) for scope in scopes(graph_module, prefix)]
    tables = {id(_weight(c, s, parameters)) for s, of_scope in found for c in of_scope.values() if c.op != LINEAR}
    for scope, by_result in found:
        weights = {node: _weight(call, scope, parameters) for node, call in by_result.items()}
        # A linear that is tied to a table takes columns and gives none.
        gives = [n for n, call in by_result.items() if call.op != LINEAR or id(weights[n]) not in tables]
        sources = {node: _layout(by_result[node], weights[node]) for node in gives}

        def takes(user: fx.Node, node: fx.Node, by_result: Mapping[fx.Node, Call] = by_result) -> bool:
            return user in by_result and by_result[user].op == LINEAR and by_result[user].input is node

        for flow in find_flows(scope.graph_module.graph, sources, takes):
            fed, by = (
                tuple(scope.parameters[by_result[node].weight] for node in nodes) for nodes in (flow.ends, flow.sources)
            )
            feeds.append(Feed(by, fed, flow.layout.width))
    return feeds


def _weight(call: Call, scope: Scope, parameters: Mapping[str, nn.Parameter]) -> nn.Parameter:
    return parameters[scope.parameters[call.weight]]


def _layout(call: Call, weight: nn.Parameter) -> Layout:
    if call.op == LINEAR:
        return Layout(weight.size(0), (call.input, 1))
    return Layout(weight.size(-1), (call.input, 0) if call.op == EMBEDDING else None)


def find_flows(
    graph: fx.Graph,
    sources: Mapping[fx.Node, Layout],
    is_end: Callable[[fx.Node, fx.Node], bool],
    is_shape_use: Callable[[fx.Node, fx.Node], bool] = lambda user, node: False,
) -> list[Flow]:
    """The flows of a graph, in its order; every one has an end.

    Args:
        graph: as it is.
        sources: the nodes whose values are put together from columns.
        is_end: (user, node) -> True if the user can take the node's value by column.
        is_shape_use: (user, node) -> True if the user asks the node for its leading dimensions only.
    """
    layouts = dict(sources)
    work: dict[fx.Node, ColumnWork] = {}
    for node in graph.nodes:
        found = None if node in sources else column_work(node)
        if found is not None and all(operand in layouts for operand in found.operands):
            first, *others = found.operands
            fits = all(_same_layout(first, other, layouts) for other in others)
            if fits and not (found.writes and _is_read_elsewhere(first, work)):
                layouts[node], work[node] = layouts[first], found
    nodes = [node for node in graph.nodes if node in layouts]
    before = 0
    while before != len(nodes):
        before = len(nodes)
        for node in reversed(nodes):
            readers = [user for user in node.users if not (is_shape_use(user, node) or _asks_dtype(user))]
            by_row = any(user not in layouts and not is_end(user, node) for user in readers)
            whole = node in work and any(operand not in layouts for operand in work[node].operands)
            if by_row or whole or not readers:
                del layouts[node]
        nodes = [node for node in nodes if node in layouts]
    return _together(nodes, sources, work, is_end)


def _asks_dtype(user: fx.Node) -> bool:
    """True for the check that torch.export writes in front of a cast: of the dtype, not of the size."""
    return user.target is torch.ops.aten._assert_tensor_metadata.default and user.args[1:3] in ((None, None), ())


def _same_layout(one: fx.Node, other: fx.Node, layouts: Mapping[fx.Node, Layout]) -> bool:
    """True if the values are known to be of one shape."""
    if layouts[one].width != layouts[other].width:
        return False
    if one is other or (layouts[one] == layouts[other] and layouts[one].rows is not None):
        return True
    return shape_of(one) is not None and shape_of(one) == shape_of(other)


def _is_read_elsewhere(node: fx.Node, work: Mapping[fx.Node, ColumnWork]) -> bool:
    """True if the memory of a value that is about to be written into may have another reader."""
    while len(node.users) == 1:
        if node not in work or not work[node].aliases:
            return False
        node = work[node].operands[0]
    return True


def _together(
    nodes: list[fx.Node],
    sources: Mapping[fx.Node, Layout],
    work: Mapping[fx.Node, ColumnWork],
    is_end: Callable[[fx.Node, fx.Node], bool],
) -> list[Flow]:
    flows: dict[fx.Node, Flow] = {}  # of each node; what hangs together shares one
    for node in nodes:
        if node in sources:
            flows[node] = Flow({node: sources[node]})
        else:
            flows[node] = _joined(flows, work[node].operands)
            flows[node].work[node] = work[node]
    for node in nodes:
        for user in node.users:
            if is_end(user, node):
                flows[node].ends.append(user)
    return list({id(flow): flow for flow in flows.values()}.values())


def _joined(flows: dict[fx.Node, Flow], operands: tuple[fx.Node, ...]) -> Flow:
    """The flow of all operands, which is from now on that of all nodes of theirs."""
    first = flows[operands[0]]
    for operand in operands[1:]:
        other = flows[operand]
        if other is not first:
            first.sources |= other.sources
            first.work |= other.work
            for node in (*other.sources, *other.work):
                flows[node] = first
    return first
