"""Results travel in a narrower dtype, where one was asked for.

Each redistribution that brings a result to its rows is told in which dtypes it sends values, and their gradient. What
was wider before is so again behind it, rounded once on its way. Ids, weights per sample, the inputs of linears, and
what is summed on its way (reduce_scatter, all_reduce) travel as they are.
"""

from __future__ import annotations

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from passes.graph_pass import PlannedPass
from passes.layout import AS_IT_IS
from passes.ops import owned, ragged, redistribute, together
from passes.sites import scopes

_RESULTS = (
    redistribute.rearrange_columns,
    redistribute.gather_columns,
    together.rearrange_together,
    ragged.rearrange_ragged,
    ragged.rearrange_bags_ragged,
    owned.send_back,
)


class NarrowResults(PlannedPass):
    """Names the dtypes at every redistribution of results; their bytes are in the edits of the sites."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        if self._context.wire == AS_IT_IS:
            return PassResult(graph_module, False)
        for scope in scopes(graph_module, self._prefix):
            for node in scope.graph_module.graph.nodes:
                if node.target in _RESULTS:
                    node.kwargs = {**node.kwargs, "wire": self._context.wire}
        return PassResult(graph_module, True)
