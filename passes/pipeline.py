"""The order of the passes over one traced module."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

import sympy
import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from passes.errors import RewriteError, describe
from passes.graph_pass import Context, Edit, PlannedPass
from passes.normalize import FoldFixedBags, FoldRenorm, InlineLayers, InlineModes
from passes.ops import redistribute
from passes.ops.renorm import renorm
from passes.optimize.batch_lookups import BatchLookups, Stacks
from passes.optimize.join_results import JoinResults
from passes.optimize.keep_columns import KeepColumns
from passes.optimize.merge_collectives import MergeCollectives
from passes.optimize.narrow_results import NarrowResults
from passes.rewrite import embedding, embedding_bag, linear, owned, parameters
from passes.rewrite.sandwich import Known, Sandwich
from passes.shapes import check_shapes
from passes.sites import EMBEDDING, EMBEDDING_BAG, LINEAR, Call, Scope, calls, nested_call_users, scopes
from passes.traffic import B, shape_of

_ARROWS = {
    True: "Shard(0) -> Replicate -> Shard(-1) -> Shard(0)",
    False: "Replicate -> Shard(-1) -> Replicate",
}
_ROWWISE = {
    True: "Shard(0) -> Shard(-1) -> Partial -> Shard(0)",
    False: "Replicate -> Shard(-1) -> Partial -> Replicate",
}
_OWNED = "Shard(0) -> ranks with columns -> Shard(-1) -> Shard(0)"
_WHOLE = {True: "Shard(0) -> Replicate -> Shard(0)", False: "Replicate"}
_REWRITES: Mapping[str, Callable[[Sandwich], None]] = {
    EMBEDDING: embedding.rewrite,
    EMBEDDING_BAG: embedding_bag.rewrite,
    LINEAR: linear.rewrite,
}


class SendToOwners(PlannedPass):
    """Rewrites the lookups of tables whose columns are on some of the ranks, as many together as can be."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        before = len(self.edits)
        for scope in scopes(graph_module, self._prefix):
            chosen = [c for c in calls(scope) if self._context.plan.has_owners(scope.parameters[c.weight])]
            if not chosen:
                continue
            differentiable, known = differentiable_nodes(scope, inputs=bool(self._prefix)), Known(scope.graph_module)
            for number, group in enumerate(owned.groups(scope, chosen, self._parameters)):
                made = [Sandwich(scope, c, self._context, self._parameters, differentiable, known) for c in group]
                shapes = [_shapes(sandwich) for sandwich in made]
                owned.rewrite(made, number)
                together = "" if len(made) == 1 else f", exchanged together with {len(made) - 1} other lookups"
                for sandwich, sizes in zip(made, shapes, strict=True):
                    ranks = self._context.plan.row(sandwich.weight_name).ranks or ()
                    what = f"sharded by column over rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}{together}"
                    self.record(_edit(sandwich, sizes, what, _OWNED))
        return PassResult(graph_module, len(self.edits) > before)


class RewriteSites(PlannedPass):
    """Rewrites every site whose weight the plan shards, and every whole lookup that depends on the ids of all ranks."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        before = len(self.edits)
        sharded = self._context.plan.sharded
        for scope in scopes(graph_module, self._prefix):
            differentiable, known = differentiable_nodes(scope, inputs=bool(self._prefix)), Known(scope.graph_module)
            for call in calls(scope):
                if scope.parameters[call.weight] in sharded or self._concerns_whole_tables(call):
                    sandwich = Sandwich(scope, call, self._context, self._parameters, differentiable, known)
                    self.record(_rewrite(sandwich))
        return PassResult(graph_module, len(self.edits) > before)

    def _concerns_whole_tables(self, call: Call) -> bool:
        """True for options that a whole table cannot leave to torch.

        The counts of ids, and the rows that are renormed, are those of all ranks; and torch does not write into what a
        DTensor gives as its local tensor.
        """
        by_frequency = bool(call.options.get("scale_grad_by_freq", False))
        return call.options.get("max_norm") is not None or (self._context.batch_sharded and by_frequency)

    def ensures(self, graph_module: fx.GraphModule) -> None:
        """No site of a sharded weight is left."""
        sharded = self._context.plan.sharded
        for scope in scopes(graph_module, self._prefix):
            for call in calls(scope):
                name = scope.parameters[call.weight]
                if name in sharded:
                    raise RewriteError(
                        describe(
                            f"{scope.path or 'the model'}, node {call.node.name}",
                            f"the planned site of {name} was not rewritten",
                            "a rewrite for every planned site",
                            "This is a fault of autoshard; please report the model.",
                        )
                    )


class ReplicateParameters(PlannedPass):
    """Reduces the gradient of every parameter that the graph uses whole."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        before = len(self.edits)
        sharded = self._context.plan.sharded
        for scope in scopes(graph_module, self._prefix):
            nested = nested_call_users(scope.graph_module)
            for node, name in scope.parameters.items():
                users = [user for user in node.users if user not in nested and not _makes_local(user)]
                if name not in sharded and users:
                    edit = parameters.rewrite(node, users, scope, self._context, self._parameters[name])
                    self.record(edit)
        return PassResult(graph_module, len(self.edits) > before)


def _makes_local(user: fx.Node) -> bool:
    """True for a node of a rewrite that reduces the parameter's gradient itself, or hands the parameter on to one."""
    return user.target in (redistribute.replicate_parameter, renorm)


def _rewrite(sandwich: Sandwich) -> Edit:
    """Rewrites one call and tells what was done."""
    call, context = sandwich.call, sandwich.context
    row = context.plan.row(sandwich.weight_name)
    rowwise = call.op == LINEAR and row.dim == 1
    what = f"sharded by column over {context.world_size} ranks"
    if row.dim is None:
        what, placement = "whole on every rank", _WHOLE[context.batch_sharded]
    elif rowwise:
        what, placement = f"sharded by input column over {context.world_size} ranks", _ROWWISE[context.batch_sharded]
    else:
        placement = _ARROWS[context.batch_sharded]
    shapes = _shapes(sandwich)
    _REWRITES[call.op](sandwich)
    return _edit(sandwich, shapes, what, placement)


def _edit(sandwich: Sandwich, shapes: str, what: str, placement: str) -> Edit:
    """The record of a call that was rewritten."""
    return Edit(
        graph=sandwich.scope.path,
        node=sandwich.call.node.name,
        module=sandwich.at,
        op=sandwich.call.op,
        parameter=sandwich.weight_name,
        what=what,
        why=sandwich.context.plan.row(sandwich.weight_name).reason,
        placement=placement,
        shapes=shapes,
        traffic=tuple(sandwich.traffic),
    )


def _shapes(sandwich: Sandwich) -> str:
    """The shapes of a call that is not rewritten yet: of its weight, whole and as it will be, and of its operands."""
    row, whole = sandwich.context.plan.row(sandwich.weight_name), tuple(sandwich.weight.shape)
    shard = (
        whole
        if row.dim is None
        else (*whole[: row.dim], max(row.sizes(sandwich.context.world_size)), *whole[row.dim + 1 :])
    )
    return f"weight {whole} -> {shard} per rank{_operand_shapes(sandwich.call)}"


def _operand_shapes(call: Call) -> str:
    shapes = [shape_of(call.input), shape_of(call.result)]
    if None in shapes:
        return ""
    before, after = ("(" + ", ".join(map(str, shape or ())) + ")" for shape in shapes)
    return f", {before} -> {after}"


def differentiable_nodes(scope: Scope, inputs: bool) -> set[fx.Node]:
    """The nodes whose value carries a gradient: what depends on a trainable parameter and is not of integers.

    The inputs of a submodule are taken to carry one (`inputs`), the batch that goes into the whole model none. Used for
    reports only.
    """
    found: set[fx.Node] = set()
    for node in scope.graph_module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            continue
        if node.op == "get_attr":
            carries = _requires_grad(scope.graph_module, str(node.target))
        elif node.op == "call_module":
            module = scope.graph_module.get_submodule(str(node.target))
            carries = any(p.requires_grad for p in module.parameters())
        else:
            carries = node.op == "placeholder" and (inputs or node in scope.parameters)
        if carries or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _requires_grad(module: torch.nn.Module, target: str) -> bool:
    owner, _, name = target.rpartition(".")
    value = getattr(module.get_submodule(owner), name, None)
    return isinstance(value, torch.Tensor) and value.requires_grad


def shard_graph(
    graph_module: fx.GraphModule,
    context: Context,
    model_parameters: Mapping[str, torch.nn.Parameter],
    prefix: str = "",
    stacks: Stacks | None = None,
) -> list[Edit]:
    """Rewrites a normalized graph in place by the plan.

    Args:
        graph_module: a traced module that `normalize` has been over; it still holds whole parameters.
        context: the plan, the group, the placement of activations.
        model_parameters: every parameter of the whole model by each of its names, for shapes and dtypes.
        prefix: path of the traced module in the model.
        stacks: the tables that share storage after the graphs before this one; those of this graph are added.

    Returns:
        A record for every edit, in the order of the graph.

    Raises:
        RewriteError: if a planned site was not rewritten or the graph is not well formed afterwards.
    """
    keep = KeepColumns(context, model_parameters, prefix)
    merge = MergeCollectives(context, model_parameters, prefix)
    passes = [
        SendToOwners(context, model_parameters, prefix),
        RewriteSites(context, model_parameters, prefix),
        ReplicateParameters(context, model_parameters, prefix),
        keep,
        BatchLookups(context, model_parameters, prefix, {} if stacks is None else stacks),
        JoinResults(context, model_parameters, prefix),
        merge,
        NarrowResults(context, model_parameters, prefix),
    ]
    for graph_pass in passes:
        graph_pass(graph_module)
    symbol = _batch_symbol(graph_module)  # before fake tensors run: their guards may settle the size of the batch
    shards: dict[fx.Node, tuple[int, list[int]]] = {}
    for scope in scopes(graph_module, prefix):
        scope.graph_module.graph.lint()
        scope.graph_module.recompile()
        shards |= _shards(scope, context)
    if not context.ragged:  # sizes that travel have no value on fake tensors
        check_shapes(graph_module, shards, prefix)
    edits = keep.amended(edit for graph_pass in passes for edit in graph_pass.edits)
    placed = [dataclasses.replace(edit, node=merge.moved.get((edit.graph, edit.node), edit.node)) for edit in edits]
    return [_in_batch(edit, symbol) for edit in placed]


def _shards(scope: Scope, context: Context) -> dict[fx.Node, tuple[int, list[int]]]:
    """For each node that makes a shard, the dimension of its parameter that is sharded, and what each rank holds."""
    found = {}
    for node in scope.graph_module.graph.find_nodes(op="call_function", target=redistribute.local_columns):
        source = node.args[0]
        while isinstance(source, fx.Node) and source.target is renorm:
            source = source.args[0]
        row = context.plan.row(scope.parameters[source])
        found[node] = row.dim or 0, row.sizes(context.world_size)
    return found


def _batch_symbol(graph_module: fx.GraphModule) -> sympy.Symbol | None:
    """The symbol that export gave to dimension 0 of the first input that has a dynamic one."""
    for node in graph_module.graph.find_nodes(op="placeholder"):
        shape = shape_of(node)
        if shape and isinstance(shape[0], sympy.Symbol):
            return shape[0]
    return None


def _in_batch(edit: Edit, symbol: sympy.Symbol | None) -> Edit:
    """The edit with the batch size written as B."""
    if symbol is None:
        return edit
    items = tuple(dataclasses.replace(t, bytes=t.bytes.subs(symbol, B)) for t in edit.traffic)
    return dataclasses.replace(edit, traffic=items, shapes=re.sub(rf"\b{symbol}\b", str(B), edit.shapes))


def normalize(graph_module: fx.GraphModule) -> None:
    """Brings every site into one spelling, in place; the graph computes what it computed before."""
    modified = False
    for graph_pass in (InlineModes(), InlineLayers(), FoldRenorm(), FoldFixedBags()):
        result = graph_pass(graph_module)
        modified |= result is not None and result.modified
    if modified:
        graph_module.recompile()
