"""The shape of a pass, and the record that it leaves of every edit.

A pass says what it needs (`requires`), edits the graph in place (`call`) and says what then holds (`ensures`), in the
manner of `torch.fx.passes.infra.pass_base`. Calling the pass runs the three in order.
"""

from __future__ import annotations

import dataclasses

from torch import fx
from torch.fx.passes.infra.pass_base import PassBase

from passes.traffic import Traffic


@dataclasses.dataclass(frozen=True)
class Edit:
    """One edit of a graph.

    Attributes:
        graph: path of the traced module.
        node: the node that was rewritten, by its name before.
        module: path of the layer.
        op: "embedding", "embedding_bag", "linear" or "parameter".
        parameter: name of the weight in the model.
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


class GraphPass(PassBase):
    """A pass over one graph module; `edits` is what its last call did."""

    def __init__(self) -> None:
        super().__init__()
        self.edits: list[Edit] = []

    def record(self, edit: Edit) -> None:
        """Adds an edit to the record."""
        self.edits.append(edit)


def outputs(graph_module: fx.GraphModule) -> fx.Node:
    """The output node of a graph."""
    return graph_module.graph.output_node()
