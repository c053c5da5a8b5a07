"""TorchRec's collections of tables, as graphs in which every lookup stands by itself.

    features, a KeyedJaggedTensor -> lists_of -> per feature: ids (N,), offsets (B+1,), weights (N,), lengths (B,)
    EmbeddingBagCollection   per feature: embedding_bag (B, D), joined -> KeyedTensor (B, sum of D)
    EmbeddingCollection      per feature: embedding (N, D)             -> {name: JaggedTensor}

Such a graph computes what the collection's own forward computes, with the same layers. That forward itself asks its
input what it is, and takes it apart by compiled operators: no trace of it is good for the next input.

TorchRec is looked up among what is imported already and never imported here: who has such a module has imported it.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from passes.errors import CaptureError, InputError, describe
from passes.sites import EMBEDDING_BAG, plain_layer

_MODULES = "torchrec.modules.embedding_modules"
_BAG_OPTIONS = ("max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "padding_idx")

# Of one feature: ids (N,), offsets (B+1,), weights (N,) or None, lengths (B,).
Lists = tuple[Tensor, Tensor, Tensor | None, Tensor]


def is_collection(module: nn.Module) -> bool:
    """True for an unsharded EmbeddingBagCollection or EmbeddingCollection of TorchRec."""
    return _builder(module) is not None


def graph_of(module: nn.Module) -> fx.Graph | None:
    """The forward of a collection, with calls of its layers; None for any other module."""
    build = _builder(module)
    return None if build is None else build(module)


def require_ragged(model: nn.Module, is_ragged: Callable[[str], bool]) -> None:
    """The number of ids of a feature differs between ranks, so that it has to travel.

    Raises:
        CaptureError: if the model has a collection with a table of whose name `is_ragged` is False.
    """
    for path, module in model.named_modules():
        if is_collection(module) and not all(is_ragged(name) for name, _ in module.named_parameters(path)):
            raise CaptureError(
                describe(
                    path or "the model",
                    f"a TorchRec {type(module).__name__}, whose features have other numbers of ids on every rank",
                    "ragged=True, by which these numbers travel before the ids",
                    "Call autoshard(..., ragged=True).",
                )
            )


def reset_tables(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Gives those of the collections' layers that are among `layers` the initial values that their tables ask for."""
    chosen = {id(layer) for layer in layers}
    for module in model.modules():
        for lookup in _lookups(module) if is_collection(module) else ():
            layer = module.get_submodule(lookup.layer)
            if id(layer) in chosen and lookup.table.init_fn is not None:
                lookup.table.init_fn(layer.weight)


def _builder(module: nn.Module) -> Callable[[nn.Module], fx.Graph] | None:
    imported = sys.modules.get(_MODULES)
    for name, build in (("EmbeddingBagCollection", _pooled), ("EmbeddingCollection", _unpooled)):
        cls = getattr(imported, name, None)
        # A subclass with a forward of its own may compute something else.
        if cls is not None and isinstance(module, cls) and type(module).forward is cls.forward:
            return build
    return None


@dataclasses.dataclass(frozen=True)
class _Lookup:
    """One feature in one table.

    Attributes:
        layer: path of the table's layer in the collection.
        feature: key of the input.
        name: key of the result; that of the feature, or feature@table where several tables share the feature.
        table: TorchRec's configuration of the table.
    """

    layer: str
    feature: str
    name: str
    table: Any


def _lookups(collection: Any) -> list[_Lookup]:
    """All lookups of a collection, in the order of its result."""
    pooled = hasattr(collection, "embedding_bags")
    tables = collection.embedding_bag_configs() if pooled else collection.embedding_configs()
    layers = "embedding_bags" if pooled else "embeddings"
    names = sys.modules[_MODULES].get_embedding_names_by_table(tables)
    return [
        _Lookup(f"{layers}.{table.name}", feature, name, table)
        for table, names_of_table in zip(tables, names, strict=True)
        for feature, name in zip(table.feature_names, names_of_table, strict=True)
    ]


def _pooled(collection: Any) -> fx.Graph:
    """The graph of an EmbeddingBagCollection."""
    lookups, graph = _lookups(collection), fx.Graph()
    features, lists = _take_apart(graph, lookups, collection.is_weighted())
    pooled = []
    for lookup in lookups:
        ids, offsets, weights, _ = lists[lookup.feature]
        operands = {"offsets": offsets, "per_sample_weights": weights if collection.is_weighted() else None}
        pooled.append(_look_up(graph, collection, lookup, {"input": ids, **operands}))
    values = graph.call_function(join, (pooled, features, [lookup.feature for lookup in lookups]))
    names, widths = [lookup.name for lookup in lookups], [lookup.table.embedding_dim for lookup in lookups]
    graph.output(graph.call_function(sys.modules[_MODULES].KeyedTensor, (names, widths, values)))
    return graph


def _unpooled(collection: Any) -> fx.Graph:
    """The graph of an EmbeddingCollection."""
    lookups, graph = _lookups(collection), fx.Graph()
    _, lists = _take_apart(graph, lookups, False)
    found: dict[str, Any] = {}
    for lookup in lookups:
        ids, _, _, lengths = lists[lookup.feature]
        values = _look_up(graph, collection, lookup, {"input": ids})
        arguments = (values, ids if collection.need_indices() else None, lengths)
        found[lookup.name] = graph.call_function(sys.modules[_MODULES].JaggedTensor, arguments)
    graph.output(found)
    return graph


def _take_apart(
    graph: fx.Graph, lookups: list[_Lookup], weighted: bool
) -> tuple[fx.Node, dict[str, tuple[fx.Node, ...]]]:
    """The node of the input, and for each feature those of its `Lists`."""
    features = graph.placeholder("features")
    names = list(dict.fromkeys(lookup.feature for lookup in lookups))
    keyed = graph.call_function(sys.modules[_MODULES].maybe_td_to_kjt, (features, None))
    of_all = graph.call_function(lists_of, (keyed, names, weighted))
    lists = {}
    for index, name in enumerate(names):
        of_one = graph.call_function(operator.getitem, (of_all, index))
        parts = ("ids", "offsets", "weights", "lengths")
        lists[name] = tuple(
            graph.create_node("call_function", operator.getitem, (of_one, place), name=f"{name}_{part}")
            for place, part in enumerate(parts)
        )
    return keyed, lists


def _look_up(graph: fx.Graph, collection: nn.Module, lookup: _Lookup, operands: dict[str, Any]) -> fx.Node:
    """The node of a lookup's result, which is float32 whatever the table is."""
    layer = collection.get_submodule(lookup.layer)
    if "offsets" in operands and plain_layer(layer) == EMBEDDING_BAG:
        node = _bag_without_last_offset(graph, layer, lookup, operands)
    else:
        node = graph.create_node("call_module", lookup.layer, (), operands, lookup.name)
    node.meta["nn_module_stack"] = {lookup.layer: (lookup.layer, type(layer))}
    return graph.call_method("float", (node,))


def _bag_without_last_offset(graph: fx.Graph, layer: Any, lookup: _Lookup, operands: dict[str, Any]) -> fx.Node:
    """The layer as its function, given the beginnings of its bags only: their lists have no ids behind the last one.

    The last offset would be one number more per rank and feature on the wire, and one bag more in every lookup.
    """
    operands["offsets"] = graph.call_function(operator.getitem, (operands["offsets"], slice(None, -1)))
    options = {name: getattr(layer, name) for name in _BAG_OPTIONS}
    arguments = {**operands, "weight": graph.get_attr(f"{lookup.layer}.weight"), **options}
    return graph.create_node("call_function", F.embedding_bag, (), arguments, lookup.name)


def lists_of(features: Any, names: list[str], weighted: bool) -> list[Lists]:
    """A TorchRec KeyedJaggedTensor, feature by feature.

    Args:
        features: the tensor. A host synchronisation, if its sizes have not been asked for before.
        names: keys of it.
        weighted: True to take its weights.

    Raises:
        InputError: if it lacks a key, or the weights.
    """
    keys, values, lengths = features.keys(), features.values(), features.lengths()
    for name in names:
        if name not in keys:
            raise _error(f"no feature {name!r} among {list(keys)}", "all features of the tables", "Add the key.")
    weights = features.weights_or_none() if weighted else None
    if weighted and weights is None:
        raise _error("no weights", "one for each id: the collection is weighted", "Give them, or is_weighted=False.")
    by_key, offsets = _by_key(features, lengths, len(keys))
    counts = _counts(features, by_key)
    ids = values.split(counts)
    by_id = [None] * len(keys) if weights is None else weights.split(counts)
    places = {key: place for place, key in enumerate(keys)}
    return [(ids[place], offsets[place], by_id[place], by_key[place]) for place in map(places.__getitem__, names)]


def _by_key(features: Any, lengths: Tensor, num_keys: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """For each key the lengths (B,) and the offsets (B+1,) of its lists."""
    if features.variable_stride_per_key():
        by_key = lengths.split(features.stride_per_key())
        return by_key, [F.pad(x.cumsum(0), (1, 0)) for x in by_key]
    # Not the stride that the features remember: the compiler would make a constant of it.
    together = lengths.view(num_keys, lengths.numel() // num_keys)
    return together.unbind(), F.pad(together.cumsum(1), (1, 0)).unbind()


def _counts(features: Any, by_key: Sequence[Tensor]) -> list[int]:
    """The number of ids of each key."""
    if not torch.compiler.is_compiling():
        counts: list[int] = features.length_per_key()
        return counts
    # Not the numbers that the features remember: each batch would be compiled anew.
    with torch._dynamo.patch_dynamo_config(capture_scalar_outputs=True):
        counts = torch.stack([lengths.sum() for lengths in by_key]).tolist()
    for count in counts:
        torch._check(count >= 0)
    torch._check(sum(counts) == features.values().size(0))
    return counts


def join(pooled: list[Tensor], features: Any, names: list[str]) -> Tensor:
    """The pooled rows of each lookup, side by side: (B, sum of D).

    Args:
        pooled: for each lookup (B, D); (B', D) where the features were deduplicated, of which B' are left.
        features: the KeyedJaggedTensor; its inverse indices say which of B' each of B was.
        names: the feature of each lookup.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is not None and inverse[1].numel() > 0:
        keys, rows = inverse
        pooled = [x.index_select(0, rows[keys.index(name)]) for x, name in zip(pooled, names, strict=True)]
    return torch.cat(pooled, dim=1)


def _error(fact: str, expected: str, remedy: str) -> InputError:
    return InputError(describe("KeyedJaggedTensor of TorchRec", fact, expected, remedy))
