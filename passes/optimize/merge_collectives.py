"""Collectives that can run together become one.

    all_gather_batch of ids, offsets, weights, inputs    -> all_gather_together
    rearrange_columns of the lookups; of the linears     -> rearrange_together
    reduce_scatter_batch                                 -> scatter_together
    replicate_parameter                                  -> replicate_together, in buckets

Two can run together if neither needs a result of the other, and what the later one needs may run earlier. Lookups and
linears are not mixed: dense layers that need no lookup are to run while its results are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from passes.graph_pass import Context, Edit, PlannedPass, replace_by_items
from passes.ops import lookup, redistribute, stacked, stacked_bags, together
from passes.ops.renorm import renorm
from passes.origin import module_path
from passes.schedule import Schedule, groups
from passes.sites import Scope, scopes

# What DistributedDataParallel takes: one all_reduce of all gradients could start only when the backward has ended.
BUCKET_BYTES = 25 * 2**20

_GATHERS = (redistribute.all_gather_batch, redistribute.all_gather_optional)
_LOOKUPS = (lookup.embedding, lookup.embedding_bag, stacked.embedding, stacked_bags.embedding_bag)


class MergeCollectives(PlannedPass):
    """Merges the collectives of one graph, forward and backward.

    Attributes:
        moved: (path of the graph, node of a parameter) -> the node that now reduces its gradient.
    """

    def __init__(self, context: Context, parameters: Mapping[str, torch.nn.Parameter], prefix: str) -> None:
        super().__init__(context, parameters, prefix)
        self.moved: dict[tuple[str, str], str] = {}

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        before = len(self.edits)
        for scope in scopes(graph_module, self._prefix):
            gathers = groups(scope.graph_module, lambda node: "gather" if node.target in _GATHERS else None)
            for number, group in enumerate(gathers):
                self._merge(scope, group, f"gathered_{number}", "all_gathers", _gather_together)
            rearrangements = groups(scope.graph_module, _kind_of_rearrangement)
            for number, group in enumerate(rearrangements):
                self._merge(scope, group, f"rearranged_{number}", "column rearrangements", _rearrange_together)
            scatters = groups(
                scope.graph_module, lambda node: "s" if node.target is redistribute.reduce_scatter_batch else None
            )
            for number, group in enumerate(scatters):
                self._merge(scope, group, f"scattered_{number}", "reduce_scatters", _scatter_together)
            for number, group in enumerate(self._buckets(scope)):
                name = f"parameters_{number}"
                self.moved.update({(scope.path, node.all_input_nodes[0].name): name for node in group})
                self._merge(scope, group, name, "gradient all_reduces", _replicate_together)
        return PassResult(graph_module, len(self.edits) > before)

    def _merge(
        self,
        scope: Scope,
        group: list[fx.Node],
        name: str,
        what: str,
        make: Callable[[fx.Graph, list[fx.Node], str], fx.Node],
    ) -> None:
        """Puts one node in the place of the first of the group, and takes its results for those of all."""
        graph, first = scope.graph_module.graph, group[0]
        with graph.inserting_before(first):
            merged = make(graph, group, name)
            replace_by_items(group, merged)
        for node in group:
            graph.erase_node(node)
        self.record(
            Edit(
                graph=scope.path,
                node=merged.name,
                module=f"{module_path(first) or first.name} and {len(group) - 1} more",
                op="collective",
                parameter="-",
                what=f"{len(group)} {what} in one",
                why="none needs a result of another",
                placement="unchanged",
                shapes="",
                traffic=(),
            )
        )

    def _buckets(self, scope: Scope) -> list[list[fx.Node]]:
        """The parameters whose gradients travel together, at most `BUCKET_BYTES` of them, in the order of first use."""
        schedule = Schedule(scope.graph_module)
        buckets: list[list[fx.Node]] = []
        size = 0
        for node in scope.graph_module.graph.find_nodes(op="call_function", target=redistribute.replicate_parameter):
            name = scope.parameters.get(node.args[0])
            if name is None or self._travels_alone(node, name):
                continue
            nbytes = self._parameters[name].numel() * self._parameters[name].dtype.itemsize
            size += nbytes
            last = buckets[-1] if buckets else []
            if last and size <= BUCKET_BYTES and schedule.hoist(node, [node.args[0]], last[0], last):
                last.append(node)
            else:
                buckets.append([node])
                size = nbytes
        return [bucket for bucket in buckets if len(bucket) > 1]

    def _travels_alone(self, node: fx.Node, name: str) -> bool:
        """True for a parameter that has no dense gradient, or whose values change within the graph."""
        parameter, source = self._parameters[name], node.args[0]
        assert isinstance(source, fx.Node)
        return (
            not parameter.requires_grad
            or self._context.plan.has_sparse_gradient(name)
            or any(user.target is renorm for user in source.users)
        )


def _kind_of_rearrangement(node: fx.Node) -> str | None:
    if node.target is not redistribute.rearrange_columns:
        return None
    columns = node.args[0]
    assert isinstance(columns, fx.Node)
    return "lookup" if columns.target in _LOOKUPS else "linear"


def _gather_together(graph: fx.Graph, group: list[fx.Node], name: str) -> fx.Node:
    options: dict[str, Any] = {
        "at": [node.kwargs.get("at") for node in group],
        "feature_dims": [node.kwargs.get("feature_dims", 0) for node in group],
    }
    arguments: tuple[Any, ...] = ([node.args[0] for node in group], group[0].args[1])
    return graph.create_node("call_function", together.all_gather_together, arguments, options, name)


def _rearrange_together(graph: fx.Graph, group: list[fx.Node], name: str) -> fx.Node:
    columns, likes, num_columns = ([node.args[place] for node in group] for place in range(3))
    options: dict[str, Any] = {"feature_dims": [node.kwargs.get("feature_dims", 0) for node in group]}
    arguments = (columns, likes, num_columns, group[0].args[3])
    return graph.create_node("call_function", together.rearrange_together, arguments, options, name)


def _scatter_together(graph: fx.Graph, group: list[fx.Node], name: str) -> fx.Node:
    partials, likes = ([node.args[place] for node in group] for place in range(2))
    options: dict[str, Any] = {"feature_dims": [node.kwargs.get("feature_dims", 0) for node in group]}
    arguments = (partials, likes, group[0].args[2])
    return graph.create_node("call_function", together.scatter_together, arguments, options, name)


def _replicate_together(graph: fx.Graph, group: list[fx.Node], name: str) -> fx.Node:
    arguments = ([node.args[0] for node in group], *group[0].args[1:])
    return graph.create_node("call_function", together.replicate_together, arguments, {}, name)
