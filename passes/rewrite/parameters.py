"""Parameters that are not sharded: each becomes a plain tensor whose gradient is reduced over the ranks."""

from __future__ import annotations

import sympy
import torch
from torch import fx

from passes.graph_pass import Edit
from passes.ops import redistribute
from passes.rewrite.sandwich import Context
from passes.sites import Scope
from passes.traffic import BACKWARD, Traffic, traffic


def rewrite(node: fx.Node, users: list[fx.Node], scope: Scope, context: Context, parameter: torch.nn.Parameter) -> Edit:
    """Puts `replicate_parameter` between a parameter's node and those of its users that want the whole of it."""
    graph = scope.graph_module.graph
    with graph.inserting_after(node):
        local = graph.call_function(redistribute.replicate_parameter, (node, context.group, context.reduction))
    if "val" in node.meta:
        local.meta["val"] = node.meta["val"]
    for user in users:
        user.replace_input_with(node, local)
    name = scope.parameters[node]
    return Edit(
        graph=scope.path,
        node=node.name,
        module=name.rpartition(".")[0],
        op="parameter",
        parameter=name,
        what="replicated" + ("" if not _reduces(context, parameter) else f", gradient {context.reduction} over ranks"),
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
    return (traffic("all_reduce", BACKWARD, nbytes),)
