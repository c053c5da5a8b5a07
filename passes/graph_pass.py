"""The shape of a pass, and the record that it leaves of every edit.

A pass says what it needs (`requires`), edits the graph in place (`call`) and says what then holds (`ensures`), in the
manner of `torch.fx.passes.infra.pass_base`. Calling the pass runs the three in order.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassBase

from passes.layout import AS_IT_IS, Wire
from passes.plan import ShardingPlan
from passes.traffic import Traffic


@dataclasses.dataclass(frozen=True)
class Context:
    """Frozen facts of one `autoshard()` call.

    Attributes:
        plan: what is done with each parameter.
        group: name of the process group.
        world_size: its number of ranks, W.
        batch_sharded: True if activations are Shard(0), False if they are replicated.
        reduction: a parameter's gradient, over the ranks' own: "mean", "sum", or "none" for replicated activations.
        ragged: the weights at whose sites the ranks' batches may differ in size.
        wire: in which dtypes results travel, forward and backward, if theirs is wider.
    """

    plan: ShardingPlan
    group: str
    world_size: int
    batch_sharded: bool
    reduction: str
    ragged: frozenset[str] = frozenset()
    wire: Wire = AS_IT_IS


@dataclasses.dataclass(frozen=True)
class Edit:
    """One edit of a graph.

    Attributes:
        graph: path of the traced module.
        node: the node that was rewritten, by its name before.
        module: path of the layer.
        op: "embedding", "embedding_bag", "linear", "parameter", "collective", "lookup" or "results".
        parameter: name of the weight in the model, "-" for an edit that is of no weight.
        what: what was done.
        why: the plan's reason.
        placement: of the activation, from the layer's input to its output.
        shapes: of the parts, readable.
        traffic: the collectives that came into the graph.
    """

    graph: str
    node: str
    module: str
    op: str
    parameter: str
    what: str
    why: str
    placement: str
    shapes: str
    traffic: tuple[Traffic, ...]


def replace_by_items(nodes: Iterable[fx.Node], merged: fx.Node) -> None:
    """Puts the items of `merged`, where the graph inserts, in the place of the nodes, which stay without users."""
    for place, node in enumerate(nodes):
        item = merged.graph.create_node("call_function", operator.getitem, (merged, place), {}, node.name)
        item.meta.update(node.meta)
        node.replace_all_uses_with(item)


class GraphPass(PassBase):
    """A pass over one graph module; `edits` is what its last call did."""

    def __init__(self) -> None:
        super().__init__()
        self.edits: list[Edit] = []

    def record(self, edit: Edit) -> None:
        """Adds an edit to the record."""
        self.edits.append(edit)


class PlannedPass(GraphPass):
    """A pass that goes by the plan.

    Args:
        context: the facts of the `autoshard()` call.
        parameters: every parameter of the whole model by each of its names, for shapes and dtypes.
        prefix: path of the traced module in the model.
    """

    def __init__(self, context: Context, parameters: Mapping[str, torch.nn.Parameter], prefix: str) -> None:
        super().__init__()
        self._context, self._parameters, self._prefix = context, parameters, prefix


def outputs(graph_module: fx.GraphModule) -> fx.Node:
    """The output node of a graph."""
    return graph_module.graph.output_node()
