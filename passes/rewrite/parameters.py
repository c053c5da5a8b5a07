"""Parameters that are not sharded: each becomes a plain tensor whose gradient is reduced over the ranks."""

from __future__ import annotations

import sympy
import torch
from torch import fx

from passes import wire
from passes.graph_pass import Context, Edit
from passes.ops import redistribute
from passes.ops.renorm import renorm
from passes.sites import Scope
from passes.traffic import Traffic, traffic


def rewrite(node: fx.Node, users: list[fx.Node], scope: Scope, context: Context, parameter: torch.nn.Parameter) -> Edit:
    """Puts `replicate_parameter` between a parameter's node and those of its users that want the whole of it.

    It stands behind the lookups that renorm the parameter in place before the first of these users.
    """
    graph = scope.graph_module.graph
    behind = current = node
    while current not in users:
        if current.target is renorm and current.args[0] is node:
            behind = current
        current = current.next
    with graph.inserting_after(behind):
        arguments = (node, context.group, context.reduction)
        local = graph.create_node(
            "call_function", redistribute.replicate_parameter, arguments, {}, f"{node.name}_local"
        )
    if "val" in node.meta:
        local.meta["val"] = node.meta["val"]
    for user in users:
        user.replace_input_with(node, local)
    return edit(scope.parameters[node], parameter, context, scope.path, node.name)


def edit(name: str, parameter: torch.nn.Parameter, context: Context, graph: str, node: str) -> Edit:
    """The record of a parameter that stays whole: in a graph, or in a module that runs as it is (`node` is empty)."""
    reduced = f", gradient {context.reduction} over ranks" if _reduces(context, parameter) else ""
    return Edit(
        graph=graph,
        node=node,
        module=name.rpartition(".")[0],
        op="parameter",
        parameter=name,
        what=f"replicated{reduced}",
        why="",
        placement="Replicate",
        shapes=" x ".join(map(str, parameter.shape)),
        traffic=_gradient_traffic(context, parameter),
    )


def _reduces(context: Context, parameter: torch.nn.Parameter) -> bool:
    return context.batch_sharded and parameter.requires_grad


def _gradient_traffic(context: Context, parameter: torch.nn.Parameter) -> tuple[Traffic, ...]:
    if not _reduces(context, parameter):
        return ()
    nbytes = sympy.Integer(parameter.numel() * parameter.dtype.itemsize)
    return tuple(traffic(*move) for move in wire.reduced(nbytes, batch_sharded=True))
