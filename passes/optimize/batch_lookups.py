"""Lookups of tables that are alike become one lookup on stacked rows.

    all_gather_batch, local_columns, embedding_bag, rearrange_columns of each table
    -> pack_ids, all_gather_batch, stack_tables, embedding_bag, rearrange_columns, results_of_bags of all together

Alike are tables of one width, dtype and pooling, all trained or all frozen, whose columns are on all ranks; each is
used once. Lookups with options (a padding row, max_norm, counts, sparse gradients, offsets, weights per sample) stay by
themselves. Ids that other lookups take too are gathered where they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from passes.graph_pass import Context, Edit, PlannedPass, replace_by_items
from passes.layout import chunk_sizes, id_dtype
from passes.ops import lookup, redistribute, stacked, stacked_bags, stacked_results
from passes.ops.collectives import group_rank
from passes.plan import COLWISE
from passes.schedule import groups
from passes.sites import Scope, scopes

_STACKED: Mapping[Any, tuple[Any, Any]] = {
    lookup.embedding: (stacked.embedding, stacked_results.results_of_ids),
    lookup.embedding_bag: (stacked_bags.embedding_bag, stacked_results.results_of_bags),
}
_OPTIONS = {"at", "mode"}

# Names of parameters that share storage -> the name of the buffer that holds all their rows.
Stacks = dict[tuple[str, ...], str]


class BatchLookups(PlannedPass):
    """Makes one lookup of those of many tables, in the outermost graph of a module.

    The graph reads the storage of a stack as a buffer of its module; `stacks_of` tells which parameters are to be views
    of it.

    Args:
        stacks: those of the graphs before this one; this pass adds its own. The graphs of a module in training and in
            evaluation have them in common.
    """

    def __init__(
        self,
        context: Context,
        parameters: Mapping[str, torch.nn.Parameter],
        prefix: str,
        stacks: Stacks,
    ) -> None:
        super().__init__(context, parameters, prefix)
        self._stacks = stacks

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        before = len(self.edits)
        scope = next(iter(scopes(graph_module, self._prefix)))
        if self._context.batch_sharded:
            uses = Counter(name for nested in scopes(graph_module, self._prefix) for name in nested.parameters.values())
            found = groups(graph_module, lambda node: self._kind(scope, node, uses))
            chosen = [group for group in found if self._may_share(self._names(scope, group))]
            packed = _exclusive(chosen)
            for number, group in enumerate(chosen):
                self._batch(scope, group, number, packed)
        return PassResult(graph_module, len(self.edits) > before)

    def _kind(self, scope: Scope, node: fx.Node, uses: Counter[str]) -> Hashable | None:
        """Equal for lookups that are alike; None for one that stays by itself."""
        if node.target not in _STACKED or len(node.users) != 1 or not node.kwargs.keys() <= _OPTIONS:
            return None
        if any(argument is not None for argument in node.args[2:]):
            return None
        ids, shard = node.args[:2]
        assert isinstance(ids, fx.Node) and isinstance(shard, fx.Node)
        if ids.target is not redistribute.all_gather_batch or shard.target is not redistribute.local_columns:
            return None
        source = _node(shard.args[0])
        name = scope.parameters.get(source)
        if name is None or source.op != "get_attr" or uses[name] != 1 or len(source.users) != 1 or shard.kwargs:
            return None
        row, parameter = self._context.plan.row(name), self._parameters[name]
        if row.strategy != COLWISE or row.ranks is not None or row.aliases or parameter.size(0) == 0:
            return None
        rearranged = next(iter(node.users))
        if rearranged.target is not redistribute.rearrange_columns:
            return None
        return (
            node.target,
            node.kwargs.get("mode"),
            parameter.size(1),
            parameter.dtype,
            parameter.device,
            parameter.requires_grad,
            id_dtype(parameter.size(0)),
        )

    def _names(self, scope: Scope, group: list[fx.Node]) -> tuple[str, ...]:
        return tuple(scope.parameters[_parameter(node)] for node in group)

    def _may_share(self, names: tuple[str, ...]) -> bool:
        """False if one of the parameters is in another stack already."""
        return names in self._stacks or not set(names) & {name for known in self._stacks for name in known}

    def _batch(self, scope: Scope, group: list[fx.Node], number: int, packed: dict[tuple[fx.Node, ...], Any]) -> None:
        graph, first = scope.graph_module.graph, group[0]
        names = self._names(scope, group)
        tables = [self._parameters[name] for name in names]
        gathers = tuple(_node(node.args[0]) for node in group)
        likes = [gather.args[0] for gather in gathers]
        where = [node.kwargs["at"] for node in group]
        process_group = self._context.group
        function, results_of = _STACKED[first.target]
        with graph.inserting_before(first):
            if gathers in packed:
                ids = packed[gathers] = packed[gathers] or self._gather(graph, gathers, number)
            else:
                arguments: tuple[Any, ...] = (list(gathers), process_group)
                ids = graph.create_node(
                    "call_function", stacked.pack_gathered, arguments, {"at": where}, f"ids_{number}_all"
                )
            stack = self._stack(scope, group, names, number)
            options: dict[str, Any] = {"at": where, "rows": [table.size(0) for table in tables]}
            if "mode" in first.kwargs:
                options["mode"] = first.kwargs["mode"]
            arguments = (ids, stack, likes, process_group)
            columns = graph.create_node("call_function", function, arguments, options, f"stack_{number}_columns")
            arguments = (columns, None, tables[0].size(1), process_group)
            rows = graph.create_node(
                "call_function", redistribute.rearrange_columns, arguments, {}, f"stack_{number}_rows"
            )
            arguments = (rows, likes, stack, process_group)
            results = graph.create_node("call_function", results_of, arguments, {}, f"stack_{number}_results")
            rearranged = [next(iter(node.users)) for node in group]
            replace_by_items(rearranged, results)
        for node in rearranged:
            _erase_with_sources(graph, node)
        total = sum(table.size(0) for table in tables)
        self.record(
            Edit(
                graph=scope.path,
                node=columns.name,
                module=f"{where[0]} and {len(group) - 1} more",
                op="lookup",
                parameter="-",
                what=f"{len(group)} lookups in one on {total} stacked rows",
                why="none needs a result of another, and the tables are alike",
                placement="unchanged",
                shapes=f"stack {(total, tables[0].size(1))}",
                traffic=(),
            )
        )

    def _gather(self, graph: fx.Graph, gathers: tuple[fx.Node, ...], number: int) -> fx.Node:
        """The ids of all ranks, gathered for all tables at once."""
        at = [gather.kwargs.get("at") for gather in gathers]
        arguments: tuple[Any, ...] = ([gather.args[0] for gather in gathers], self._context.group)
        ids = graph.create_node("call_function", stacked.pack_ids, arguments, {"at": at}, f"ids_{number}")
        arguments = (ids, self._context.group)
        return graph.create_node("call_function", redistribute.all_gather_batch, arguments, {}, f"ids_{number}_all")

    def _stack(self, scope: Scope, group: list[fx.Node], names: tuple[str, ...], number: int) -> fx.Node:
        """The node that makes one differentiable tensor of the tables, and the buffers that it reads."""
        module, context = scope.graph_module, self._context
        name = self._stacks.setdefault(names, f"_autoshard_stack_{len(self._stacks)}")
        tables = [self._parameters[name] for name in names]
        width = chunk_sizes(tables[0].size(1), context.world_size)[group_rank(context.group)]
        rows = torch.tensor([table.size(0) for table in tables])
        # Its shape and dtype, no storage: the parameters are not sharded yet.
        placeholder = tables[0].detach().new_zeros(1, 1).expand(int(rows.sum()), width)
        module.register_buffer(name, placeholder, persistent=False)
        # With values, though a parameter may be on the meta device; it goes where the tables will be.
        module.register_buffer(first_rows_of(name), rows.cumsum(0) - rows, persistent=False)
        reads = [module.graph.get_attr(each) for each in (name, first_rows_of(name))]
        parameters = [_parameter(node) for node in group]
        for parameter in parameters:
            reads[0].prepend(parameter)
        reduction = _node(group[0].args[1]).args[2]
        arguments = (*reads, parameters, context.group, reduction)
        return module.graph.create_node("call_function", stacked.stack_tables, arguments, {}, f"stack_{number}")


def first_rows_of(name: str) -> str:
    """The name of the buffer with the first row of each table of a stack."""
    return f"{name}_first"


def stacks_of(graph: fx.Graph) -> dict[str, tuple[str, ...]]:
    """The name of each stack's buffer -> the parameters that are views of it, by their paths in the graph's module."""
    return {
        str(_node(node.args[0]).target): tuple(str(_node(each).target) for each in _nodes(node.args[2]))
        for node in graph.find_nodes(op="call_function", target=stacked.stack_tables)
    }


def _parameter(node: fx.Node) -> fx.Node:
    """The parameter that a lookup looks up."""
    return _node(_node(node.args[1]).args[0])


def _nodes(argument: Any) -> list[Any]:
    return list(argument)


def _node(argument: Any) -> fx.Node:
    assert isinstance(argument, fx.Node)
    return argument


def _exclusive(found: list[list[fx.Node]]) -> dict[tuple[fx.Node, ...], Any]:
    """The gathers of each group, where no other node takes them; later the node of the gather in their place."""
    users: dict[tuple[fx.Node, ...], list[fx.Node]] = {}
    for group in found:
        users.setdefault(tuple(_node(node.args[0]) for node in group), []).extend(group)
    return {
        gathers: None
        for gathers, members in users.items()
        if len(set(gathers)) == len(gathers) and all(set(gather.users) <= set(members) for gather in gathers)
    }


def _erase_with_sources(graph: fx.Graph, node: fx.Node) -> None:
    """Takes a rearrangement out of the graph, with the lookup, the shard and the gather that nobody else needs."""
    todo = [node]
    while todo:
        node = todo.pop()
        if not node.users and node.op == "call_function" and node.target is not lookup.narrow_ids:
            sources = node.all_input_nodes
            graph.erase_node(node)
            todo.extend(sources)
