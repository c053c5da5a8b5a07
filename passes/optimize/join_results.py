"""The results of stacked bags that a model puts side by side are put there at once.

    results_of_bags, its items, a cat or stack of them (and of others) along dimension 1
    -> cat_bags or stack_bags

A cat of many pieces is a kernel for each where Inductor compiles for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from passes.graph_pass import Edit, PlannedPass
from passes.ops import stacked_results
from passes.sites import Scope, scopes

# What a model calls -> what takes its place, and the dimension that is 1 from the end.
_JOINS: Mapping[Any, tuple[Any, int]] = {
    torch.cat: (stacked_results.cat_bags, -1),
    torch.concat: (stacked_results.cat_bags, -1),
    torch.ops.aten.cat.default: (stacked_results.cat_bags, -1),
    torch.stack: (stacked_results.stack_bags, -2),
    torch.ops.aten.stack.default: (stacked_results.stack_bags, -2),
}


class JoinResults(PlannedPass):
    """Puts results side by side where all of a stack, and nothing else, stand in one list in their order."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        before = len(self.edits)
        for scope in scopes(graph_module, self._prefix):
            graph = scope.graph_module.graph
            for results in graph.find_nodes(op="call_function", target=stacked_results.results_of_bags):
                self._join(scope, results)
        return PassResult(graph_module, len(self.edits) > before)

    def _join(self, scope: Scope, results: fx.Node) -> None:
        rows, likes = results.args[:2]
        assert isinstance(likes, (list, tuple))
        items = sorted(results.users, key=lambda item: int(str(item.args[1])))
        users = {user for item in items for user in item.users}
        if len(items) != len(likes) or len(users) != 1:
            return
        (join,) = users
        pieces, start = join.args[0] if join.args else None, 0
        if join.target not in _JOINS or not isinstance(pieces, (list, tuple)) or items[0] not in pieces:
            return
        function, from_the_end = _JOINS[join.target]
        start = pieces.index(items[0])
        end = start + len(items)
        if list(pieces[start:end]) != items or set(items) & {*pieces[:start], *pieces[end:]}:
            return
        if _dim(join) not in (1, from_the_end):
            return
        graph = scope.graph_module.graph
        with graph.inserting_before(join):
            arguments: tuple[Any, ...] = (list(pieces[:start]), rows, list(pieces[end:]), list(likes))
            joined = graph.create_node("call_function", function, arguments, {}, join.name)
        joined.meta.update(join.meta)
        join.replace_all_uses_with(joined)
        for node in (join, *items, results):
            graph.erase_node(node)
        self.record(
            Edit(
                graph=scope.path,
                node=join.name,
                module=self._prefix or "the model",
                op="results",
                parameter="-",
                what=f"the results of {len(items)} lookups are put side by side at once",
                why="they come as one",
                placement="unchanged",
                shapes="unchanged",
                traffic=(),
            )
        )


def _dim(join: fx.Node) -> Any:
    """The dimension of a `cat` or `stack`; None if it is called with other options."""
    if len(join.args) > 2 or not join.kwargs.keys() <= {"dim"}:
        return None
    return join.args[1] if len(join.args) == 2 else join.kwargs.get("dim", 0)
