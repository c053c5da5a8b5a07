"""What may run earlier than it stands in a graph, and what may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from passes.ops.renorm import renorm
from passes.schedule import Schedule


class Around(nn.Module):
    """Something between two sines, the second of which takes what is made of `y`."""

    def __init__(self, between: Callable[[Tensor], Any], make: Callable[[Tensor], Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.between, self.make = between, make
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = torch.sin(x)
        for layer in self.layers:
            first = first + layer(x)
        self.between(x)
        return first + torch.sin(self.make(y))


def hoisted(between: Callable[[Tensor], Any], make: Callable[[Tensor], Tensor], *layers: nn.Module) -> list[str] | None:
    """The nodes before the first sine, after the second one's operands were moved; None if they may not."""
    graph_module = fx.symbolic_trace(Around(between, make, *layers))
    first, second = (node for node in graph_module.graph.nodes if node.target is torch.sin)
    moved = Schedule(graph_module).hoist(second, second.all_input_nodes, first, [first])
    graph_module.graph.lint()
    names = [node.name for node in graph_module.graph.nodes]
    return names[: names.index(first.name)] if moved else None


def nothing(x: Tensor) -> None:
    del x


def test_pure_operands_move_in_their_order() -> None:
    assert hoisted(torch.exp, lambda y: torch.neg(y[:, 1]) * 2) == ["x", "y", "getitem", "neg", "mul"]
    assert hoisted(nothing, lambda y: y) == ["x", "y"]


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.mul_(2),
        lambda x: torch.relu_(x),
        lambda x: F.relu(x, True),
        lambda x: F.relu(x, inplace=True),
        lambda x: torch.add(x, x, out=x),
        lambda x: torch.ops.aten.mul_.Tensor(x, x),
    ],
)
def test_nothing_moves_over_a_write(between: Callable[[Tensor], Any]) -> None:
    assert hoisted(between, lambda y: y + 1) is None
    assert hoisted(between, lambda y: y) is None


def with_hook(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, args, output: None)
    return layer


@pytest.mark.parametrize("layer", [nn.ReLU(inplace=True), with_hook(nn.ReLU())], ids=["in place", "with a hook"])
def test_nothing_moves_over_a_layer_that_may_write(layer: nn.Module) -> None:
    assert hoisted(nothing, lambda y: y + 1, layer) is None


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.Dropout(), nn.BatchNorm1d(3), nn.LayerNorm(3)])
def test_layers_of_torch_write_into_their_own_buffers_at_most(layer: nn.Module) -> None:
    assert hoisted(nothing, lambda y: y + 1, layer) is not None


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(torch._C._set_grad_enabled, lambda x, y: (False,)), (F.relu, lambda x, y: (x, True))],
    ids=["mode", "in place by position"],
)
def test_nothing_moves_over_a_change_that_stands_in_a_graph(
    function: Callable[..., Any], arguments: Callable[[fx.Node, fx.Node], tuple[Any, ...]]
) -> None:
    assert not is_hoisted(function, arguments)


def test_a_table_is_not_read_before_it_is_renormed() -> None:
    def of(table: int) -> Callable[[fx.Node, fx.Node], tuple[Any, ...]]:
        return lambda *nodes: (nodes[table], nodes[0], 1.0, 2.0, None)

    assert is_hoisted(renorm, of(0))
    assert not is_hoisted(renorm, of(1))


def is_hoisted(function: Callable[..., Any], arguments: Callable[[fx.Node, fx.Node], tuple[Any, ...]]) -> bool:
    """Whether what reads `y` may move over a call that stands between it and what reads `x`."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.call_function(torch.sin, (x,))
    graph.call_function(function, arguments(x, y))
    second = graph.call_function(torch.sin, (graph.call_function(torch.neg, (y,)),))
    graph.output((first, second))
    return Schedule(fx.GraphModule({}, graph)).hoist(second, second.all_input_nodes, first, [first])


def test_what_waits_for_a_member_does_not_move_to_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.sin, (x,))
    second = graph.call_function(torch.sin, (graph.call_function(torch.neg, (first,)),))
    graph.output(second)
    assert not Schedule(fx.GraphModule({}, graph)).hoist(second, second.all_input_nodes, first, [first])


@pytest.mark.parametrize(
    "make",
    [
        lambda y: F.dropout(y, 0.5),
        lambda y: torch.rand_like(y),
        lambda y: torch.bernoulli(y),
        lambda y: torch.ops.aten.bernoulli.p(y, 0.5),
        lambda y: y.neg_(),
    ],
)
def test_what_draws_random_numbers_or_writes_does_not_move(make: Callable[[Tensor], Tensor]) -> None:
    assert hoisted(nothing, make) is None
