"""Finding sites: one matcher for every spelling of an embedding, an embedding_bag and a linear."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from autoshard.capture import capture
from passes.pipeline import normalize
from passes.sites import (
    EMBEDDING,
    EMBEDDING_BAG,
    LAYER_TYPES,
    LINEAR,
    Site,
    find_other_uses,
    find_sites,
    match,
    scopes,
)
from tests.models import MODELS, layers

aten = torch.ops.aten


class Weights(nn.Module):
    """The parameters of hand-built graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, 7))
        self.weight = nn.Parameter(torch.randn(3, 7))
        self.bias = nn.Parameter(torch.randn(3))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7, padding_idx=2)
        self.bag = nn.EmbeddingBag(11, 7, mode="max")
        self.part = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 2, bias=False))

    def forward(self, ids: Tensor) -> Tensor:
        return self.part(self.table(ids).sum(1) + self.bag(ids))


IDS = torch.tensor([[0, 3, 1], [2, 2, 10]])
EXPECTED = {
    (EMBEDDING, "table", "table.weight", None, (("padding_idx", 2),)),
    (EMBEDDING_BAG, "bag", "bag.weight", None, (("mode", "max"),)),
    (LINEAR, "part.0", "part.0.weight", "part.0.bias", ()),
    (LINEAR, "part.1", "part.1.weight", None, ()),
}


def facts(sites: tuple[Site, ...]) -> set[tuple[Any, ...]]:
    assert len(set(sites)) == len(sites)
    return {(site.op, site.module, site.weight, site.bias, site.options) for site in sites}


def by_layers() -> fx.GraphModule:
    """call_module: the tracer of fx itself."""
    return fx.symbolic_trace(Layers())


def by_functions() -> fx.GraphModule:
    """F.*: what the layers' own code calls."""
    (region,) = [region for region in capture(Layers()).regions if not region.is_layer]
    return region.graph


def by_export() -> fx.GraphModule:
    return torch.export.export(Layers(), (IDS,), strict=False).module()


def by_strict_export() -> fx.GraphModule:
    return torch.export.export(Layers(), (IDS,), strict=True).module()


def by_dynamo() -> fx.GraphModule:
    """What a backend of torch.compile is given: its weights are placeholders, which name no parameter."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(Layers(), backend=keep)(IDS)
    torch._dynamo.reset()
    (graph,) = graphs
    return graph


@pytest.mark.parametrize("make", [by_layers, by_functions, by_export, by_strict_export])
def test_the_sites_of_a_model_are_the_same_by_every_capture(make: Callable[[], fx.GraphModule]) -> None:
    assert facts(find_sites(make())) == EXPECTED


@pytest.mark.parametrize("make", [by_layers, by_functions, by_export])
def test_sites_stay_the_same_when_a_graph_is_normalized(make: Callable[[], fx.GraphModule]) -> None:
    graph = make()
    normalize(graph)
    found = {site[:1] + site[2:] for site in facts(find_sites(graph))}
    assert found == {site[:1] + site[2:] for site in EXPECTED}
    modules = [graph.get_submodule(str(node.target)) for node in graph.graph.find_nodes(op="call_module")]
    assert not any(type(module) in LAYER_TYPES for module in modules)


def test_a_graph_that_is_normalized_computes_what_it_computed() -> None:
    for make in (by_layers, by_functions, by_export):
        torch.manual_seed(3)
        graph = make()
        before = graph(IDS)
        normalize(graph)
        assert torch.equal(graph(IDS), before)


def test_the_matcher_knows_the_spellings_of_dynamo() -> None:
    calls = [call for node in by_dynamo().graph.nodes if (call := match(node)) is not None]
    found = [(call.op, call.weight.op, call.bias is not None, call.options.get("padding_idx")) for call in calls]
    assert sorted(found, key=str) == [
        (EMBEDDING, "placeholder", False, 2),
        (EMBEDDING_BAG, "placeholder", False, None),
        (LINEAR, "placeholder", False, None),
        (LINEAR, "placeholder", True, None),
    ]


def test_a_prefix_goes_before_every_name() -> None:
    found = facts(find_sites(by_functions(), "model.inner"))
    assert found == {
        (op, f"model.inner.{module}", f"model.inner.{weight}", bias and f"model.inner.{bias}", options)
        for op, module, weight, bias, options in EXPECTED
    }


@pytest.mark.parametrize("make", [by_layers, by_functions, by_export])
def test_finding_changes_nothing(make: Callable[[], fx.GraphModule]) -> None:
    graph = make()
    before, metas = graph.code, [dict(node.meta) for node in graph.graph.nodes]
    first = find_sites(graph)
    find_other_uses(graph)
    assert find_sites(graph) == first
    graph.recompile()
    assert graph.code == before
    assert [dict(node.meta) for node in graph.graph.nodes] == metas


@pytest.mark.parametrize("ladder", ["fx", "export"])
def test_a_site_names_the_line_that_made_it(ladder: str) -> None:
    graph = by_functions() if ladder == "fx" else by_export()
    for site in find_sites(graph):
        file, _, line = site.where.rpartition(":")
        assert file == __file__
        assert "self.part(self.table(ids)" in open(file).readlines()[int(line) - 1]


# ---------------------------------------------------------------- spellings in graphs built by hand


def hand_built(target: Callable[..., Any], args: Callable[..., tuple[Any, ...]], **kwargs: Any) -> fx.GraphModule:
    """A graph of one call; `args` gets its input and get_attr nodes of `Weights`, kwargs name such nodes by strings."""
    graph = fx.Graph()
    nodes = {"x": graph.placeholder("x")}
    nodes |= {name: graph.get_attr(name) for name in ("table", "weight", "bias")}
    named = {key: nodes.get(value, value) if isinstance(value, str) else value for key, value in kwargs.items()}
    result = graph.call_function(target, args(**nodes), named)
    if "embedding_bag" in str(target) and target is not F.embedding_bag:
        result = graph.call_function(operator.getitem, (result, 0))
    graph.output(result)
    return fx.GraphModule(Weights(), graph)


Arguments = Callable[..., tuple[Any, ...]]
SPELLINGS: dict[str, tuple[Callable[..., Any], Arguments, dict[str, Any], tuple[Any, ...]]] = {
    "F.embedding": (F.embedding, lambda x, table, **_: (x, table, 4), {}, (EMBEDDING, (("padding_idx", 4),))),
    "F.embedding by keywords": (
        F.embedding,
        lambda **_: (),
        {"weight": "table", "input": "x", "max_norm": 1.5},
        (EMBEDDING, (("max_norm", 1.5),)),
    ),
    "torch.embedding": (torch.embedding, lambda x, table, **_: (table, x, 4), {}, (EMBEDDING, (("padding_idx", 4),))),
    "torch.embedding by keywords": (
        torch.embedding,
        lambda **_: (),
        {"weight": "table", "indices": "x"},
        (EMBEDDING, ()),
    ),
    "aten.embedding": (
        aten.embedding.default,
        lambda x, table, **_: (table, x, -1, True),
        {},
        (EMBEDDING, (("scale_grad_by_freq", True),)),
    ),
    "F.embedding_bag": (
        F.embedding_bag,
        lambda x, table, **_: (x, table),
        {"mode": "sum"},
        (EMBEDDING_BAG, (("mode", "sum"),)),
    ),
    "torch.embedding_bag": (
        torch.embedding_bag,
        lambda x, table, **_: (table, x, x, False, 1),
        {},
        (EMBEDDING_BAG, ()),
    ),
    "aten.embedding_bag": (
        aten.embedding_bag.default,
        lambda x, table, **_: (table, x, x),
        {},
        (EMBEDDING_BAG, (("mode", "sum"),)),
    ),
    "aten.embedding_bag.padding_idx": (
        aten.embedding_bag.padding_idx,
        lambda x, table, **_: (table, x, x, False, 2, False, None, True, 3),
        {},
        (EMBEDDING_BAG, (("include_last_offset", True), ("mode", "max"), ("padding_idx", 3))),
    ),
    "aten._embedding_bag": (
        aten._embedding_bag.default,
        lambda x, table, **_: (table, x, x, False, 2),
        {},
        (EMBEDDING_BAG, (("mode", "max"),)),
    ),
    "F.linear": (F.linear, lambda x, weight, bias, **_: (x, weight, bias), {}, (LINEAR, ())),
    "torch._C._nn.linear": (torch._C._nn.linear, lambda x, weight, **_: (x, weight), {}, (LINEAR, ())),
    "F.linear by keywords": (
        F.linear,
        lambda x, **_: (x,),
        {"weight": "weight", "bias": "bias"},
        (LINEAR, ()),
    ),
    "aten.linear": (aten.linear.default, lambda x, weight, bias, **_: (x, weight, bias), {}, (LINEAR, ())),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_spelling_is_one_site(spelling: str) -> None:
    target, args, kwargs, (op, options) = SPELLINGS[spelling]
    graph = hand_built(target, args, **kwargs)
    (site,) = find_sites(graph)
    assert (site.op, tuple(sorted(site.options))) == (op, options)
    assert site.weight == ("weight" if op == LINEAR else "table")
    has_bias = "bias" in kwargs or (op == LINEAR and spelling in ("F.linear", "aten.linear"))
    assert site.bias == ("bias" if has_bias else None)
    assert find_other_uses(graph) == ()


@pytest.mark.parametrize("padding", [-1, -11, 10])
def test_a_padding_row_of_minus_one_is_the_last_for_functional_and_none_for_aten(padding: int) -> None:
    functional = hand_built(F.embedding, lambda x, table, **_: (x, table, padding))
    operator = hand_built(aten.embedding.default, lambda x, table, **_: (table, x, padding))
    (one,), (other,) = find_sites(functional), find_sites(operator)
    assert dict(one.options) == {"padding_idx": padding}
    assert dict(other.options) == ({} if padding == -1 else {"padding_idx": padding})


@pytest.mark.parametrize("make", [functools.partial(make_fx, pre_dispatch=True), make_fx], ids=["pre_dispatch", "post"])
def test_graphs_of_make_fx_have_the_sites_that_can_still_be_told(make: Callable[..., Any]) -> None:
    """After decomposition a linear is an addmm, which could come from anything."""
    model = Layers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = make(model)(IDS)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {(site.op, names[id(graph.get_parameter(site.weight))]) for site in find_sites(graph)}
    lookups = {(EMBEDDING, "table.weight"), (EMBEDDING_BAG, "bag.weight")}
    linears = {(LINEAR, "part.0.weight"), (LINEAR, "part.1.weight")}
    assert found == (lookups if make is make_fx else lookups | linears)


@pytest.mark.parametrize(
    "target",
    [
        lambda table, x: table[x],
        lambda table, x: torch.index_select(table, 0, x.flatten()),
        lambda table, x: F.one_hot(x, 11).to(table.dtype) @ table,
        lambda table, x: torch.matmul(table, x.to(table.dtype)),
        lambda table, x: F.bilinear(x, x, table),
    ],
    ids=["index", "index_select", "one_hot", "matmul", "bilinear"],
)
def test_other_uses_of_a_weight_are_no_sites(target: Callable[..., Any]) -> None:
    graph = hand_built(target, lambda x, table, **_: (table, x))
    assert find_sites(graph) == ()
    assert {use.parameter for use in find_other_uses(graph)} == {"table"}


def test_indexing_a_weight_is_no_embedding_in_any_capture() -> None:
    model = MODELS["indexed"].make()
    exported = torch.export.export(model, MODELS["indexed"].one_batch(), strict=False).module()
    traced = next(region.graph for region in capture(model).regions if not region.is_layer)
    for graph in (exported, traced):
        assert {site.weight for site in find_sites(graph)} == {"layer.weight"}
        assert {use.parameter for use in find_other_uses(graph)} == {"table.weight"}


def test_a_call_whose_weight_is_no_parameter_is_no_site() -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("table")
    scaled = graph.call_function(torch.mul, (weight, 2))
    graph.output((graph.call_function(F.embedding, (x, scaled)), graph.call_function(F.linear, (x, x))))
    module = fx.GraphModule(Weights(), graph)
    assert find_sites(module) == ()
    assert [(use.parameter, use.op) for use in find_other_uses(module)] == [("table", "mul")]


def test_a_weight_that_is_also_returned_has_another_use() -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("table")
    graph.output((graph.call_function(F.embedding, (x, weight)), weight))
    module = fx.GraphModule(Weights(), graph)
    assert [site.weight for site in find_sites(module)] == ["table"]
    assert [(use.parameter, use.op) for use in find_other_uses(module)] == [("table", "output")]


def test_a_weight_that_is_its_own_input_has_another_use() -> None:
    """linear(w, w): the second use is not the site's weight."""
    graph = fx.Graph()
    weight = graph.get_attr("weight")
    graph.output(graph.call_function(F.linear, (weight, weight)))
    module = fx.GraphModule(Weights(), graph)
    assert [use.parameter for use in find_other_uses(module)] == ["weight"]


def test_one_bias_may_stand_at_several_sites() -> None:
    graph = fx.Graph()
    x, weight, bias = graph.placeholder("x"), graph.get_attr("weight"), graph.get_attr("bias")
    graph.output([graph.call_function(F.linear, (x, weight, bias)) for _ in range(2)])
    sites = find_sites(fx.GraphModule(Weights(), graph))
    assert [(site.weight, site.bias) for site in sites] == [("weight", "bias")] * 2
    assert len({site.node for site in sites}) == 2


# ---------------------------------------------------------------- nesting


class Nested(nn.Module):
    """Sites in two regions without gradient, one between them, one in a checkpoint, one in plain sight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.outer = nn.Linear(6, 6)
        self.inner = nn.Linear(6, 6, bias=False)
        self.fixed = nn.Linear(6, 6)
        self.block = nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        with torch.no_grad():
            fixed = self.fixed(x) + 1
            with torch.enable_grad():
                inner = self.inner(x) * 2
            fixed = fixed + self.outer(fixed)
        block = checkpoint(self.block, fixed + inner, use_reentrant=False)
        assert isinstance(block, Tensor)
        return block


NESTED = {
    (EMBEDDING, "table.weight", None),
    (LINEAR, "outer.weight", "outer.bias"),
    (LINEAR, "inner.weight", None),
    (LINEAR, "fixed.weight", "fixed.bias"),
    (LINEAR, "block.weight", "block.bias"),
}


def nested() -> fx.GraphModule:
    return torch.export.export(Nested(), (IDS,), strict=False).module()


def test_sites_in_regions_without_gradient_are_found_under_the_parameters_names() -> None:
    sites = find_sites(nested())
    assert {(site.op, site.weight, site.bias) for site in sites} == NESTED
    assert len(sites) == len(NESTED)


def test_the_graph_of_a_nested_site_tells_its_nesting() -> None:
    graphs = {site.weight: site.graph for site in find_sites(nested(), "part")}
    assert {graphs[f"part.{name}.weight"] for name in ("table", "inner", "block")} == {"part"}
    within = {graphs[f"part.{name}.weight"] for name in ("fixed", "outer")}
    assert len(within) == 2
    assert all(graph.startswith("part.") for graph in within)


def test_parameters_that_are_handed_into_a_nested_graph_have_no_other_use() -> None:
    assert find_other_uses(nested()) == ()


def test_finding_in_nested_graphs_changes_none_of_them() -> None:
    graph = nested()
    before = [scope.graph_module.code for scope in scopes(graph)]
    assert len(before) == 3
    find_sites(graph)
    find_other_uses(graph)
    for scope in scopes(graph):
        scope.graph_module.recompile()
    assert [scope.graph_module.code for scope in scopes(graph)] == before


def test_regions_without_gradient_are_put_into_the_graph_around_them() -> None:
    graph = nested()
    before = graph(IDS)
    normalize(graph)
    sites = find_sites(graph)
    assert {(site.op, site.weight, site.bias) for site in sites} == NESTED
    assert {site.graph for site in sites} == {""}
    assert torch.equal(graph(IDS), before)
    assert torch.is_grad_enabled()


def in_checkpoint(depth: int, extra: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node] | None = None) -> fx.GraphModule:
    """F.linear in `depth` checkpoints, as Dynamo writes them: the weight is handed in as an operand."""
    inner = fx.Graph()
    x, weight = inner.placeholder("x"), inner.placeholder("anything")
    result = inner.call_function(F.linear, (x, weight))
    inner.output((extra(inner, result, weight) if extra else result,))
    body = fx.GraphModule(nn.Module(), inner)
    for level in range(depth):
        root = Weights() if level == depth - 1 else nn.Module()
        root.add_module("wrap_body_0", body)
        graph = fx.Graph()
        x = graph.placeholder("x")
        weight = graph.get_attr("weight") if level == depth - 1 else graph.placeholder("of_its_own_name")
        call = graph.call_function(
            torch.ops.higher_order.tag_activation_checkpoint,
            (graph.get_attr("wrap_body_0"), x, weight),
            {"use_reentrant": False},
        )
        graph.output((graph.call_function(operator.getitem, (call, 0)),))
        body = fx.GraphModule(root, graph)
    return body


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_sites_in_checkpoints_are_found(depth: int) -> None:
    (site,) = find_sites(in_checkpoint(depth), "part")
    assert (site.op, site.weight, site.bias) == (LINEAR, "part.weight", None)
    assert site.graph == ".".join(["part"] + ["wrap_body_0"] * depth)
    assert find_other_uses(in_checkpoint(depth)) == ()


@pytest.mark.parametrize("depth", [1, 2])
def test_another_use_of_a_weight_inside_of_a_checkpoint_is_found(depth: int) -> None:
    graph = in_checkpoint(depth, lambda graph, x, weight: graph.call_function(torch.matmul, (x, weight)))
    assert [(use.parameter, use.op) for use in find_other_uses(graph)] == [("weight", "matmul")]


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: self.other(x), (x,))
        assert isinstance(out, Tensor)
        return out


def test_both_branches_of_a_condition_are_looked_into() -> None:
    graph = torch.export.export(Conditional(), (torch.randn(3, 6),), strict=False).module()
    found = {site.weight for site in find_sites(graph)}
    assert found | {use.parameter for use in find_other_uses(graph)} >= {"one.weight", "other.weight"}


def test_what_is_found_in_a_graph_module_that_is_called_as_a_module_has_its_full_name() -> None:
    """Capture gives such a module a region of its own; here its names must not be taken for those of others."""
    inner = fx.symbolic_trace(nn.Sequential(nn.Linear(6, 5), nn.Tanh()))
    root = nn.Module()
    root.add_module("inner", inner)
    graph = fx.Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    found = {(site.weight, site.bias) for site in find_sites(fx.GraphModule(root, graph))}
    assert found <= {("inner.0.weight", "inner.0.bias")}


# ---------------------------------------------------------------- ties


@pytest.mark.parametrize("ladder", ["fx", "export"])
@pytest.mark.parametrize("name", ["tied_tables", "tied_head", "shared_submodule"])
def test_each_use_of_a_tied_weight_is_a_site(name: str, ladder: str) -> None:
    case = MODELS[name]
    model = case.make()
    if ladder == "fx":
        graph = next(region.graph for region in capture(model).regions if not region.is_layer)
    else:
        graph = torch.export.export(model, case.one_batch(), strict=False).module()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    calls = {"tied_tables": ["one", "other"], "tied_head": ["tokens", "layer", "head"]}
    expected = calls.get(name, ["first", "block.0", "block.0", "first"])
    found = [id(parameters[site.weight]) for site in find_sites(graph)]
    assert sorted(found) == sorted(id(model.get_submodule(path).weight) for path in expected)


def test_no_site_of_a_test_model_is_missed_or_made_up() -> None:
    """By layers: what the layers of a model are and what the graph of its whole forward uses is one set."""
    for name in ("mlp", "two_tower", "dlrm", "transformer", "bags", "dict"):
        model = MODELS[name].make()
        (region,) = [region for region in capture(model).regions if not region.is_layer]
        kinds = {nn.Embedding: EMBEDDING, nn.EmbeddingBag: EMBEDDING_BAG, nn.Linear: LINEAR}
        expected = {
            (kinds[type(layer)], path, f"{path}.weight", getattr(layer, "bias", None) is not None)
            for path, layer in layers(model).items()
        }
        found = {(s.op, s.module, s.weight, s.bias is not None) for s in find_sites(region.graph)}
        assert found == expected
        assert len(find_sites(region.graph)) == len(expected)
