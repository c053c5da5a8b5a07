"""What the three rewrites share: the redistributions before and after an op on this rank's columns.

batch-sharded   all_gather_batch -> op on (W*B, ...) -> rearrange_columns
replicated      copy_to_columns  -> op on (B, ...)   -> gather_columns
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from passes.ops import redistribute
from passes.ops.renorm import norm_dtype, renorm
from passes.plan import ShardingPlan
from passes.sites import Call, Scope
from passes.traffic import BACKWARD, FORWARD, Traffic, W, itemsize_of, rows_of, traffic


@dataclasses.dataclass(frozen=True)
class Context:
    """Frozen facts of one `autoshard()` call.

    Attributes:
        plan: what is done with each parameter.
        group: name of the process group.
        world_size: its number of ranks, W.
        batch_sharded: True if activations are Shard(0), False if they are replicated.
        reduction: a parameter's gradient, over the ranks' own: "mean", "sum", or "none" for replicated activations.
    """

    plan: ShardingPlan
    group: str
    world_size: int
    batch_sharded: bool
    reduction: str


@dataclasses.dataclass
class Sandwich:
    """Builds the nodes of one rewrite in front of `call.node`, and collects their traffic."""

    scope: Scope
    call: Call
    context: Context
    parameters: Mapping[str, torch.nn.Parameter]
    differentiable: frozenset[fx.Node]
    traffic: list[Traffic] = dataclasses.field(default_factory=list)

    @property
    def at(self) -> str:
        """Module path of the layer, for errors."""
        return self.scope.module_of(self.call.node) or self.weight_name

    @property
    def weight_name(self) -> str:
        return self.scope.parameters[self.call.weight]

    @property
    def weight(self) -> torch.nn.Parameter:
        """The whole parameter, for its shape and dtype only."""
        return self.parameters[self.weight_name]

    def add(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A new node in front of the call's node, with its stack trace and module path."""
        graph = self.scope.graph_module.graph
        with graph.inserting_before(self.call.node):
            node = graph.create_node("call_function", function, args, kwargs, name)
        for key in ("nn_module_stack", "stack_trace"):
            if key in self.call.node.meta:
                node.meta[key] = self.call.node.meta[key]
        return node

    def shard(self, parameter: fx.Node) -> fx.Node:
        """This rank's columns of a parameter."""
        context = self.context
        return self.add(
            f"{parameter.name}_shard", redistribute.local_columns, parameter, context.group, context.reduction
        )

    def to_columns(
        self,
        x: fx.Node,
        feature_dims: int = 0,
        gather: Callable[..., Any] = redistribute.all_gather_batch,
        copy: Callable[..., Any] = redistribute.copy_to_columns,
    ) -> fx.Node:
        """The operand `x` of the call, with the rows of all ranks."""
        needs_gradient = x in self.differentiable
        group = self.context.group
        if self.context.batch_sharded:
            self.moves("all_gather", FORWARD, self._nbytes(x))
            if needs_gradient:
                self.moves("reduce_scatter", BACKWARD, self._nbytes(x) * W)
            more = {"feature_dims": feature_dims} if feature_dims else {}
            return self.add(f"{x.name}_all", gather, x, group, at=self.at, **more)
        if needs_gradient:
            self.moves("all_reduce", BACKWARD, self._nbytes(x))
            return self.add(f"{x.name}_all", copy, x, group)
        return x

    def from_columns(
        self, columns: fx.Node, like: fx.Node | None, rows: sympy.Expr, num_columns: int, feature_dims: int = 0
    ) -> fx.Node:
        """The call's result out of this rank's columns of it; `rows` is the number of rows on one rank."""
        group = self.context.group
        itemsize = itemsize_of(self.call.result, self.weight.dtype)
        differentiable = self.call.result in self.differentiable
        if self.context.batch_sharded:
            for direction in (FORWARD, BACKWARD) if differentiable else (FORWARD,):
                self.moves("all_to_all", direction, rows * num_columns * itemsize)
            more = {"feature_dims": feature_dims} if feature_dims else {}
            return self.add(
                f"{self.call.node.name}_rows", redistribute.rearrange_columns, columns, like, num_columns, group, **more
            )
        self.moves("all_gather", FORWARD, rows * sympy.ceiling(sympy.Integer(num_columns) / W) * itemsize)
        return self.add(
            f"{self.call.node.name}_rows", redistribute.gather_columns, columns, num_columns, group, at=self.at
        )

    def lookup_options(self) -> dict[str, Any]:
        """The options of a lookup that differ from their defaults; a padding row counts from the first row."""
        options = self.call.options
        chosen: dict[str, Any] = {name: True for name in ("scale_grad_by_freq", "sparse") if options[name]}
        if options["padding_idx"] is not None:
            chosen["padding_idx"] = options["padding_idx"] % self.weight.size(0)
        return chosen

    def lookup_shard(self, ids: fx.Node) -> fx.Node:
        """This rank's columns of the table, the rows that `ids` look up renormed if the layer has a max_norm."""
        shard, options = self.shard(self.call.weight), self.call.options
        if options["max_norm"] is None:
            return shard
        rows = rows_of(self.call.input) * (W if self.context.batch_sharded else 1)
        self.moves("all_reduce", FORWARD, rows * norm_dtype(self.weight.dtype).itemsize)
        arguments = (shard, ids, float(options["max_norm"]), float(options["norm_type"]))
        return self.add(f"{shard.name}_renormed", renorm, *arguments, self.context.group)

    def moves(self, collective: str, direction: str, nbytes: sympy.Expr) -> None:
        """Notes a collective of `nbytes` per rank."""
        self.traffic.append(traffic(collective, direction, nbytes))

    def replace(self, out: fx.Node) -> None:
        """Puts `out` in the place of the call's result, and takes the call's nodes out of the graph."""
        graph = self.scope.graph_module.graph
        result, node = self.call.result, self.call.node
        if "val" in result.meta:
            out.meta["val"] = result.meta["val"]
        result.replace_all_uses_with(out)
        for unused in [*node.users, node]:
            graph.erase_node(unused)

    def _nbytes(self, x: fx.Node) -> sympy.Expr:
        is_ids = x is self.call.input and self.call.op != "linear"
        return rows_of(x) * itemsize_of(x, torch.int64 if is_ids else self.weight.dtype)
