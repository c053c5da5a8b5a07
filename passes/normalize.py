"""One spelling for every site, so that each op kind needs one rewrite.

InlineLayers    call_module of a torch layer               -> get_attr of its parameters and the function
FoldRenorm      detach, embedding_renorm_, then a lookup   -> a lookup with max_norm
                (how torch.export writes max_norm)
FoldFixedBags   embedding_bag of flattened ids (B*L,) with -> embedding_bag of ids (B, L)
                offsets 0, L, 2L, ...  (how torch.export
                writes a bag of 2-D ids)
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.passes.infra.pass_base import PassResult

from passes.graph_pass import GraphPass
from passes.sites import EMBEDDING, EMBEDDING_BAG, Call, has_hooks, match, scopes


class InlineLayers(GraphPass):
    """Writes layers that stand in the graph as modules as their functions."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        modified = False
        for scope in scopes(graph_module):
            for node in scope.graph_module.graph.find_nodes(op="call_module"):
                layer = scope.graph_module.get_submodule(str(node.target))
                if type(layer) in _SPELLINGS and not has_hooks(layer):
                    _inline(node, layer, scope.graph_module)
                    modified = True
        return PassResult(graph_module, modified)


class FoldRenorm(GraphPass):
    """Gives lookups their max_norm back: the renorm is then one of all ranks' ids and of whole rows."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        modified = False
        for scope in scopes(graph_module):
            graph = scope.graph_module.graph
            for node in graph.find_nodes(op="call_function", target=torch.ops.aten.embedding_renorm_.default):
                call = _renormed_lookup(node)
                if call is not None:
                    _fold_renorm(node, call, graph)
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


class InlineModes(GraphPass):
    """Puts graphs that are nested for a mode's sake into the graph around them: Dynamo takes no such call."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        modified = False
        for node in list(graph_module.graph.nodes):
            if node.target in (_GRAD_MODE, _AUTOCAST):
                _inline_mode(node, graph_module)
                modified = True
        return PassResult(graph_module, modified)


_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def _inline_mode(node: fx.Node, graph_module: fx.GraphModule) -> None:
    graph = graph_module.graph
    position = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
    fetch, settings, operands = node.args[position], node.args[:position], node.args[position + 1 :]
    assert isinstance(fetch, fx.Node)
    nested = graph_module.get_submodule(str(fetch.target))
    assert isinstance(nested, fx.GraphModule)
    InlineModes()(nested)
    with graph.inserting_before(node):
        if node.target is _GRAD_MODE:
            before = graph.call_function(torch.is_grad_enabled)
            graph.call_function(torch._C._set_grad_enabled, settings)
        else:
            before = graph.call_function(torch.amp.autocast_mode._enter_autocast, settings)
        values: dict[fx.Node, Any] = dict(zip(nested.graph.find_nodes(op="placeholder"), operands, strict=True))
        out = graph.graph_copy(nested.graph, values)
        leave = torch._C._set_grad_enabled if node.target is _GRAD_MODE else torch.amp.autocast_mode._exit_autocast
        graph.call_function(leave, (before,))
    for user in list(node.users):
        assert user.target is operator.getitem and isinstance(out, (tuple, list))
        user.replace_all_uses_with(out[user.args[1]])  # type: ignore[index]  # the getitem's number
        graph.erase_node(user)
    graph.erase_node(node)
    if not fetch.users:
        graph.erase_node(fetch)


def layer_graph(layer: nn.Module) -> fx.Graph | None:
    """The forward of a torch layer by itself; None for any other module, and for one whose forward is not torch's."""
    spelling = _SPELLINGS.get(type(layer))
    if spelling is None or "forward" in vars(layer) or type(layer).forward.__module__ != type(layer).__module__:
        return None
    graph = fx.Graph()
    required, *optional = spelling.operands
    operands = {required: graph.placeholder(required)}
    operands |= {name: graph.placeholder(name, default_value=None) for name in optional}
    values = {name: graph.get_attr(name) for name, p in layer.named_parameters(recurse=False) if p is not None}
    options = {name: getattr(layer, name) for name in spelling.options}
    graph.output(graph.call_function(spelling.function, (), {**operands, **values, **options}))
    return graph


def _inline(node: fx.Node, layer: nn.Module, graph_module: fx.GraphModule) -> None:
    graph = graph_module.graph
    spelling = _SPELLINGS[type(layer)]
    with graph.inserting_before(node):
        names = [name for name, p in layer.named_parameters(recurse=False) if p is not None]
        values = {name: graph.get_attr(f"{node.target}.{name}") for name in names}
        operands = dict(zip(spelling.operands, node.args, strict=False)) | dict(node.kwargs)
        options = {name: getattr(layer, name) for name in spelling.options}
        new = graph.call_function(spelling.function, (), {**operands, **values, **options})
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


@dataclasses.dataclass(frozen=True)
class _Spelling:
    """A layer as its function: what its forward takes, and which of its attributes are options."""

    function: Callable[..., Any]
    operands: tuple[str, ...] = ("input",)
    options: tuple[str, ...] = ()


_LOOKUP_OPTIONS = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_BAG_OPTIONS = (*_LOOKUP_OPTIONS, "mode", "include_last_offset")
_SPELLINGS: dict[type[nn.Module], _Spelling] = {
    nn.Embedding: _Spelling(F.embedding, options=_LOOKUP_OPTIONS),
    nn.EmbeddingBag: _Spelling(F.embedding_bag, ("input", "offsets", "per_sample_weights"), _BAG_OPTIONS),
    nn.Linear: _Spelling(F.linear),
    # No site, but its parameters' gradients can then travel with those of others.
    nn.LayerNorm: _Spelling(F.layer_norm, options=("normalized_shape", "eps")),
}


def _renormed_lookup(renorm: fx.Node) -> Call | None:
    """The lookup that a renorm belongs to: the next use of the weight, with the same ids."""
    detached, ids = renorm.args[:2]
    if renorm.users or not isinstance(detached, fx.Node) or detached.target is not torch.ops.aten.detach.default:
        return None
    (weight,) = detached.all_input_nodes
    if len(detached.users) > 1:
        return None
    node = renorm.next
    while node.op != "root":
        if weight in node.all_input_nodes:
            call = match(node)
            return call if call is not None and call.weight is weight and call.input is ids else None
        node = node.next
    return None


def _fold_renorm(renorm: fx.Node, call: Call, graph: fx.Graph) -> None:
    function = F.embedding if call.op == EMBEDDING else F.embedding_bag
    norm = dict(zip(("max_norm", "norm_type"), renorm.args[2:], strict=True))
    with graph.inserting_before(call.node):
        new = graph.call_function(function, (call.input, call.weight), {**call.options, **norm})
    new.meta.update(call.result.meta)
    call.result.replace_all_uses_with(new)
    detached = renorm.args[0]
    for node in [*call.node.users, call.node, renorm]:
        graph.erase_node(node)
    _erase_unused([detached], graph)


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
    for node in [*call.node.users, call.node]:
        graph.erase_node(node)
    _erase_unused([call.input, call.options["offsets"], call.options["per_sample_weights"]], graph)
    return True


def _fixed_length_ids(call: Call) -> fx.Node | None:
    """The 2-D ids behind a bag's flattened ids, if its offsets step by their second dimension."""
    offsets = call.options["offsets"]
    ids = _flattened(call.input)
    if ids is None or call.options["include_last_offset"] or not isinstance(offsets, fx.Node):
        return None
    if offsets.target is not torch.ops.aten.arange.start_step:
        return None
    shape = ids.meta["val"].shape
    start, end, *rest = (a.meta["val"] if isinstance(a, fx.Node) else a for a in offsets.args)
    step = rest[0] if rest else 1
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
