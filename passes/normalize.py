"""One spelling for every site, so that each op kind needs one rewrite.

InlineLayers    call_module of a torch layer               -> get_attr of its parameters and the function
FoldFixedBags   embedding_bag of flattened ids (B*L,) with -> embedding_bag of ids (B, L)
                offsets 0, L, 2L, ...  (how torch.export
                writes a bag of 2-D ids)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.passes.infra.pass_base import PassResult

from passes.graph_pass import GraphPass
from passes.sites import EMBEDDING, EMBEDDING_BAG, LAYER_TYPES, Call, match, scopes


class InlineLayers(GraphPass):
    """Writes layers that stand in the graph as modules as their functions."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        modified = False
        for scope in scopes(graph_module):
            for node in scope.graph_module.graph.find_nodes(op="call_module"):
                layer = scope.graph_module.get_submodule(str(node.target))
                if type(layer) in LAYER_TYPES:
                    _inline(node, layer, scope.graph_module)
                    modified = True
        return PassResult(graph_module, modified)


class FoldFixedBags(GraphPass):
    """Gives bags of one length their 2-D ids back; their offsets need not travel then."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        modified = False
        for scope in scopes(graph_module):
            for node in list(scope.graph_module.graph.nodes):
                call = match(node)
                if call is not None and call.op == EMBEDDING_BAG and _fold(call, scope.graph_module.graph):
                    modified = True
        return PassResult(graph_module, modified)


def _inline(node: fx.Node, layer: nn.Module, graph_module: fx.GraphModule) -> None:
    graph = graph_module.graph
    op = LAYER_TYPES[type(layer)]
    with graph.inserting_before(node):
        names = [name for name, p in layer.named_parameters(recurse=False) if p is not None]
        values = {name: graph.get_attr(f"{node.target}.{name}") for name in names}
        operands = dict(zip(_FORWARD[op], node.args, strict=False)) | dict(node.kwargs)
        if op == EMBEDDING:
            function, arguments = F.embedding, _options(layer, _EMBEDDING_OPTIONS)
        elif op == EMBEDDING_BAG:
            function, arguments = F.embedding_bag, _options(layer, _BAG_OPTIONS)
        else:
            function, arguments = F.linear, {}
        new = graph.call_function(function, (), {**operands, **values, **arguments})
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


_FORWARD = {
    EMBEDDING: ("input",),
    EMBEDDING_BAG: ("input", "offsets", "per_sample_weights"),
    "linear": ("input",),
}
_EMBEDDING_OPTIONS = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_BAG_OPTIONS = (*_EMBEDDING_OPTIONS, "mode", "include_last_offset")


def _options(layer: nn.Module, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in names}


def _fold(call: Call, graph: fx.Graph) -> bool:
    """Rewrites a bag with `reshape(ids, [-1])` and `arange(0, numel, L)`; False where it is another bag."""
    ids = _fixed_length_ids(call)
    if ids is None:
        return False
    weights = call.options["per_sample_weights"]
    if isinstance(weights, fx.Node):
        weights = _flattened(weights)
        if weights is None:
            return False
    with graph.inserting_before(call.node):
        new = graph.call_function(
            F.embedding_bag,
            (ids, call.weight),
            {
                **{k: v for k, v in call.options.items() if k not in ("offsets", "include_last_offset")},
                "per_sample_weights": weights,
            },
        )
    new.meta.update(call.result.meta)
    call.result.replace_all_uses_with(new)
    for node in (call.result, call.node):
        if not node.users:
            graph.erase_node(node)
    _erase_unused([call.input, call.options["offsets"], call.options["per_sample_weights"]], graph)
    return True


def _fixed_length_ids(call: Call) -> fx.Node | None:
    """The 2-D ids behind a bag's flattened ids, if its offsets step by their second dimension."""
    offsets = call.options["offsets"]
    ids = _flattened(call.input)
    if ids is None or call.options["include_last_offset"] or not isinstance(offsets, fx.Node):
        return None
    if offsets.target is not torch.ops.aten.arange.start_step or len(offsets.args) != 3:
        return None
    shape = ids.meta["val"].shape
    start, end, step = (a.meta["val"] if isinstance(a, fx.Node) else a for a in offsets.args)
    fixed = len(shape) == 2 and _equal(start, 0) and _equal(step, shape[1]) and _equal(end, shape[0] * shape[1])
    return ids if fixed else None


def _equal(left: Any, right: Any) -> bool:
    """Equal whatever the batch is: as expressions, without a guard."""
    return bool(_expression(left) == _expression(right))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _flattened(node: fx.Node) -> fx.Node | None:
    """x, where the node is reshape(x, [-1])."""
    reshapes = (torch.ops.aten.reshape.default, torch.ops.aten.view.default)
    if node.target in reshapes and node.args[1] == [-1]:
        source = node.args[0]
        return source if isinstance(source, fx.Node) and "val" in source.meta else None
    return None


def _erase_unused(nodes: list[Any], graph: fx.Graph) -> None:
    """Erases nodes that lost their last user, and then their inputs that did."""
    for node in nodes:
        if isinstance(node, fx.Node) and not node.users and node.op == "call_function":
            inputs = list(node.all_input_nodes)
            graph.erase_node(node)
            _erase_unused(inputs, graph)
