"""After a rewrite the graph's outputs must have the shapes and dtypes that they had before.

The rewritten graph runs on the fake tensors of the capture. Parameters are whole there, so the nodes that make a shard
of one take their columns from it here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from passes.errors import RewriteError, describe
from passes.ops import redistribute, stacked
from passes.ops.collectives import group_rank
from passes.ops.renorm import renorm


def check_shapes(graph_module: fx.GraphModule, shards: dict[fx.Node, tuple[int, list[int]]], path: str) -> None:
    """Runs the graph on fake tensors and compares its outputs with what the capture recorded.

    Args:
        graph_module: rewritten; its placeholders and outputs have fake values in their `meta["val"]`.
        shards: for each node that makes a shard, the dimension of the parameter that is sharded, and what each rank
            holds of it.
        path: of the graph, for errors.

    Raises:
        RewriteError: if an output's shape or dtype is another one.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    inputs = [node.meta.get("val") for node in placeholders]
    mode = next((v.fake_mode for v in inputs if isinstance(v, torch._subclasses.FakeTensor)), None)
    if mode is None or any(value is None for value in inputs):
        return
    arguments = graph_module.graph.output_node().args[0]
    expected = pytree.tree_map_only(fx.Node, lambda node: node.meta.get("val"), arguments)
    with mode:
        got = _FakeRun(graph_module, mode, shards).run(*inputs, enable_io_processing=False)
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True)
    for index, (before, after) in enumerate(pairs):
        if isinstance(before, Tensor) and _signature(before) != _signature(after):
            raise RewriteError(
                describe(
                    f"{path or 'the model'}, output {index}",
                    f"it is {_signature(after)} after the rewrite",
                    f"{_signature(before)}, as before",
                    "This is a fault of autoshard; please report the model.",
                )
            )


def _signature(value: Any) -> tuple[str, str]:
    return str(tuple(value.shape)), str(value.dtype)


class _FakeRun(fx.Interpreter):
    """Runs a graph on fake tensors, with shards in the place of sharded parameters."""

    def __init__(
        self, graph_module: fx.GraphModule, mode: FakeTensorMode, shards: dict[fx.Node, tuple[int, list[int]]]
    ) -> None:
        super().__init__(graph_module)
        self._mode, self._shards = mode, shards

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "get_attr":
            value = self.fetch_attr(str(n.target))
            return self._mode.from_tensor(value, static_shapes=True) if isinstance(value, Tensor) else value
        if n.target is renorm:
            return self.fetch_args_kwargs_from_env(n)[0][0]
        if n.target is stacked.stack_tables:
            table, first, _, _, reduction = self.fetch_args_kwargs_from_env(n)[0]
            return stacked.Stack(table, first.to(table.device), [], reduction, None)
        if n.target is redistribute.local_columns:
            parameter, group, _ = self.fetch_args_kwargs_from_env(n)[0]
            (dim, sizes), rank = self._shards[n], group_rank(group)
            return parameter.narrow(dim, sum(sizes[:rank]), sizes[rank])
        return super().run_node(n)
