"""Columns stay columns: redistributions that undo one another, with column-wise work between them, go.

    batch-sharded   rearrange_columns -> work on (B, D) -> rows_to_columns     becomes work on (W*B, d)
    replicated      gather_columns    -> work on (B, D) -> slice_columns       becomes work on (B, d)

Of two linears, the second rowwise, is left: gather rows, linear, work, linear, one reduce_scatter (replicated inputs:
linear, work, linear, one all_reduce).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from passes.column_flow import Flow, Layout, find_flows
from passes.graph_pass import Context, Edit, PlannedPass
from passes.ops import on_columns, redistribute
from passes.sites import Scope, scopes
from passes.traffic import Traffic

_TO_COLUMNS = (redistribute.rows_to_columns, redistribute.slice_columns)


class KeepColumns(PlannedPass):
    """Lets values stay column-sharded between the ops of one graph that work by column."""

    def __init__(self, context: Context, parameters: Mapping[str, torch.nn.Parameter], prefix: str) -> None:
        super().__init__(context, parameters, prefix)
        self._removed: list[Traffic] = []
        self._begin: set[tuple[str, str]] = set()  # (graph, node) of the sites that are given columns
        self._end: set[tuple[str, str]] = set()  # of the sites whose result stays columns

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        before = len(self.edits)
        for scope in scopes(graph_module, self._prefix):
            graph = scope.graph_module.graph
            for flow in find_flows(graph, _sources(graph), _takes_columns, _is_shape_use):
                self._keep(scope, flow)
        return PassResult(graph_module, len(self.edits) > before)

    def amended(self, edits: Iterable[Edit]) -> list[Edit]:
        """The records of earlier passes, without the redistributions that have gone since."""
        return [self._amended(edit) for edit in edits]

    def _amended(self, edit: Edit) -> Edit:
        placements, site = edit.placement.split(" -> "), (edit.graph, edit.node)
        placements = placements[1 if site in self._begin else 0 : -1 if site in self._end else None]
        items = tuple(item for item in edit.traffic if not any(item is gone for gone in self._removed))
        return dataclasses.replace(edit, placement=" -> ".join(placements), traffic=items)

    def _keep(self, scope: Scope, flow: Flow) -> None:
        self._tell(scope, flow)
        first = next(iter(flow.sources))
        for node in (*flow.sources, *flow.work):
            for user in [user for user in node.users if _is_shape_use(user, node)]:
                user.args = (user.args[0], first.args[1], *user.args[2:])
                user.kwargs = {**user.kwargs, "feature_dims": first.kwargs.get("feature_dims", 0)}
        for node, work in flow.work.items():
            node.meta.pop("val", None)  # of all columns
            if work.random:
                self._draw_apart(node, flow.layout.width)
        for source in flow.sources:
            self._remove(source)
        for end in flow.ends:
            self._remove(end)

    def _remove(self, node: fx.Node) -> None:
        self._removed.extend(node.meta["traffic"])
        columns = node.args[0]
        assert isinstance(columns, fx.Node)
        node.replace_all_uses_with(columns)
        node.graph.erase_node(node)

    def _draw_apart(self, node: fx.Node, width: int) -> None:
        """Lets each rank drop its columns by random numbers of their own."""
        (columns,), graph, group = node.all_input_nodes, node.graph, self._context.group
        operands: tuple[Any, ...] = (columns, group)
        results: tuple[Any, ...] = (node, group)
        before: Callable[..., Any] = on_columns.shift_rows
        after: Callable[..., Any] = on_columns.unshift_rows
        if not self._context.batch_sharded:
            before, operands = on_columns.ones_of_all_columns, (columns, width)
            after, results = on_columns.times_own_columns, (columns, node, width, group)
        with graph.inserting_before(node):
            drawn = graph.create_node("call_function", before, operands, {}, f"{node.name}_of")
        with graph.inserting_after(node):
            out = graph.create_node("call_function", after, results, {}, f"{node.name}_columns")
        node.replace_all_uses_with(out, delete_user_cb=lambda user: user is not out)
        node.replace_input_with(columns, drawn)

    def _tell(self, scope: Scope, flow: Flow) -> None:
        begin, begin_at = _sites(flow.sources)
        end, end_at = _sites(user for node in flow.ends for user in node.users)
        self._end |= {(scope.path, node) for node in begin}
        self._begin |= {(scope.path, node) for node in end}
        first = next(iter(flow.sources)).args[0]
        assert isinstance(first, fx.Node)
        self.record(
            Edit(
                graph=scope.path,
                node=first.name,
                module=begin_at,
                op="collective",
                parameter="-",
                what=f"columns of {begin_at} stay until {end_at}",
                why="every op in between works on each column by itself",
                placement="Shard(-1)",
                shapes="",
                traffic=(),
            )
        )


def _sources(graph: fx.Graph) -> dict[fx.Node, Layout]:
    rearranged = graph.find_nodes(op="call_function", target=redistribute.rearrange_columns)
    gathered = graph.find_nodes(op="call_function", target=redistribute.gather_columns)
    return {
        **{node: Layout(node.args[2], _rows(node)) for node in rearranged},
        **{node: Layout(node.args[1], "all") for node in gathered},
    }


def _rows(node: fx.Node) -> object:
    """What a rearrangement has its leading dimensions of; None where it is told by the columns alone."""
    return None if node.args[1] is None else (node.args[1], node.kwargs.get("feature_dims", 0))


def _takes_columns(user: fx.Node, node: fx.Node) -> bool:
    return user.target in _TO_COLUMNS and user.args[0] is node


def _is_shape_use(user: fx.Node, node: fx.Node) -> bool:
    """True for an operand `like` of a redistribution."""
    shaped = user.target in (redistribute.rearrange_columns, redistribute.reduce_scatter_batch)
    return shaped and user.args[1] is node and user.args[0] is not node


def _sites(nodes: Iterable[fx.Node]) -> tuple[list[str], str]:
    """The calls that redistributions were made for: their nodes, and their modules as text."""
    sites = [node.meta["site"] for node in nodes]
    return [node for node, _ in sites], ", ".join(dict.fromkeys(at for _, at in sites))
