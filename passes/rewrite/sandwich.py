"""What the three rewrites share: the redistributions before and after an op on this rank's columns.

batch-sharded   all_gather_batch -> op on (W*B, ...) -> rearrange_columns
ragged          exchange_counts, all_gather_ragged -> op on (N, ...) -> rearrange_ragged
replicated      copy_to_columns  -> op on (B, ...)   -> gather_columns
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from passes import wire
from passes.graph_pass import Context
from passes.layout import id_dtype
from passes.ops import lookup, ragged, redistribute
from passes.ops.renorm import norm_dtype, renorm
from passes.plan import REPLICATE
from passes.schedule import Schedule
from passes.sites import LINEAR, Call, Scope
from passes.traffic import FORWARD, Traffic, W, itemsize_of, rows_of, traffic

_COUNT_BYTES = 8


class Known:
    """The redistributed inputs of a graph, so that two uses of one input share them."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._schedule = Schedule(graph_module)
        self._nodes: dict[Any, fx.Node] = {}

    def find(self, key: Any, at: fx.Node) -> fx.Node | None:
        """The node that was remembered under the key, if it has the same value here."""
        node = self._nodes.get(key)
        return None if node is None or self._schedule.is_written_between(node, at) else node

    def remember(self, key: Any, node: fx.Node) -> None:
        """Keeps a node."""
        self._nodes[key] = node


@dataclasses.dataclass
class Sandwich:
    """Builds the nodes of one rewrite in front of `before`, or of `call.node`, and collects their traffic.

    `checked` says that the operands are known to be of one kind on all ranks.
    """

    scope: Scope
    call: Call
    context: Context
    parameters: Mapping[str, torch.nn.Parameter]
    differentiable: set[fx.Node]
    known: Known
    traffic: list[Traffic] = dataclasses.field(default_factory=list)
    before: fx.Node | None = None
    checked: bool = False

    @property
    def at(self) -> str:
        """Module path of the layer, for errors."""
        return self.scope.module_of(self.call.node) or self.weight_name

    @property
    def feature_dims(self) -> int:
        """Dimensions at the end of the input that are no rows: the `in` of a linear's (..., in)."""
        return 1 if self.call.op == LINEAR else 0

    @property
    def weight_name(self) -> str:
        """Name of the weight in the model."""
        return self.scope.parameters[self.call.weight]

    @property
    def ragged(self) -> bool:
        """True if the ranks' inputs may differ in size."""
        return self.weight_name in self.context.ragged

    @property
    def weight(self) -> torch.nn.Parameter:
        """The whole parameter, for its shape and dtype only."""
        return self.parameters[self.weight_name]

    @property
    def sharded(self) -> bool:
        """True if the weight is sharded, False if every rank holds all of it."""
        return self.context.plan.row(self.weight_name).strategy != REPLICATE

    @property
    def dim(self) -> int | None:
        """The dimension of the weight that is sharded, None if none is."""
        return self.context.plan.row(self.weight_name).dim

    def add(
        self, name: str, function: Callable[..., Any], *args: Any, moves: Sequence[wire.Move] = (), **kwargs: Any
    ) -> fx.Node:
        """A new node in front of the call's node, with its stack trace and module path, and the collectives it makes.

        Its meta tells them as "traffic", and as "site" the node and the module of the call.
        """
        graph = self.scope.graph_module.graph
        with graph.inserting_before(self.before or self.call.node):
            node = graph.create_node("call_function", function, args, kwargs, name)
        for key in ("nn_module_stack", "stack_trace"):
            if key in self.call.node.meta:
                node.meta[key] = self.call.node.meta[key]
        items = tuple(traffic(*move) for move in moves)
        self.traffic.extend(items)
        node.meta["traffic"], node.meta["site"] = items, (self.call.node.name, self.at)
        return node

    def once(
        self, name: str, function: Callable[..., Any], *args: Any, moves: Sequence[wire.Move] = (), **kwargs: Any
    ) -> fx.Node:
        """`add`, or the node that another site has made of the same operands."""
        options = {key: value for key, value in kwargs.items() if key != "at"}
        key = (function, repr((args, options)))
        node = self.known.find(key, self.before or self.call.node)
        if node is None:
            node = self.add(name, function, *args, moves=moves, **kwargs)
            self.known.remember(key, node)
        return node

    def shard(self, parameter: fx.Node) -> fx.Node:
        """This rank's part of a parameter as a plain tensor: its columns, or all of it where it is replicated."""
        if not self.sharded:
            return self.whole(parameter)
        arguments = (parameter, self.context.group, self.context.reduction)
        sparse: dict[str, Any] = {"sparse": True} if self.context.plan.row(self.weight_name).sparse_gradient else {}
        return self.add(f"{parameter.name}_shard", redistribute.local_columns, *arguments, **sparse)

    def whole(self, parameter: fx.Node) -> fx.Node:
        """A parameter that every rank holds all of, as a plain tensor; its gradient is reduced over the ranks."""
        arguments = (parameter, self.context.group, self.context.reduction)
        moves: list[wire.Move] = []
        value = self.parameters.get(self.scope.parameters.get(parameter, ""))
        sparse = parameter is self.call.weight and self.context.plan.row(self.weight_name).sparse_gradient
        if self.context.batch_sharded and value is not None and value.requires_grad and not sparse:
            nbytes = sympy.Integer(value.numel() * value.dtype.itemsize)
            moves = wire.reduced(nbytes, batch_sharded=True)
        return self.add(f"{parameter.name}_local", redistribute.replicate_parameter, *arguments, moves=moves)

    def counts(self, *operands: fx.Node | None) -> list[Any]:
        """For each operand the node of its rows on every rank; Nones where all ranks have the same number."""
        if not self.ragged:
            return [None] * len(operands)
        moves = wire.gathered(sympy.Integer(_COUNT_BYTES * len(operands)), batch_sharded=True, gradient=False)
        name = f"{self.call.node.name}_counts"
        where = {**self._where(), **self._features()}
        counts = self.once(name, ragged.exchange_counts, list(operands), self.context.group, moves=moves, **where)
        return [self.once(name, operator.getitem, counts, index) for index in range(len(operands))]

    def gather(self, x: fx.Node, counts: fx.Node | None) -> fx.Node:
        """The rows of all ranks of a floating point operand."""
        moves = self._gather_moves(x)
        if self.context.batch_sharded:
            return self._gather(x, counts, moves)
        return self.once(f"{x.name}_all", redistribute.copy_to_columns, x, self.context.group, moves=moves)

    def gather_ids(self, ids: fx.Node, counts: fx.Node | None) -> fx.Node:
        """The ids of all ranks."""
        if not self.context.batch_sharded:
            arguments = (ids, self.weight.size(0), self.context.group)
            return self.add(f"{ids.name}_checked", lookup.replicated_ids, *arguments, at=self.at)
        nbytes = rows_of(ids) * self.wire_itemsize(ids)
        return self._gather(self.narrow(ids), counts, wire.gathered(nbytes, batch_sharded=True, gradient=False))

    def narrow(self, ids: fx.Node) -> fx.Node:
        """Ids or offsets as they travel."""
        if id_dtype(self.weight.size(0)) != torch.int32:
            return ids
        node = self.once(f"{ids.name}_narrow", lookup.narrow_ids, ids)
        if isinstance(value := ids.meta.get("val"), torch.Tensor):
            node.meta["val"] = value.to(torch.int32) if value.dtype == torch.int64 else value
        return node

    def wire_itemsize(self, ids: fx.Node) -> int:
        """Bytes of an id or offset that travels."""
        return min(itemsize_of(ids, torch.int64), id_dtype(self.weight.size(0)).itemsize)

    def _gather(self, x: fx.Node, counts: fx.Node | None, moves: Sequence[wire.Move]) -> fx.Node:
        name, group = f"{x.name}_all", self.context.group
        if self.ragged:
            return self.once(name, ragged.all_gather_ragged, x, counts, group, moves=moves, **self._features())
        where = {**self._where(), **self._features()}
        return self.once(name, redistribute.all_gather_batch, x, group, moves=moves, **where)

    def gather_optional(self, x: fx.Node, counts: fx.Node | None) -> fx.Node:
        """The rows of all ranks of an operand that is None in some calls."""
        context = self.context
        if not (self.sharded or context.batch_sharded):
            return x
        name, moves = f"{x.name}_all", self._gather_moves(x)
        if not context.batch_sharded:
            return self.once(name, redistribute.copy_optional, x, context.group, moves=moves)
        if self.ragged:
            return self.once(name, ragged.all_gather_ragged_optional, x, counts, context.group, moves=moves)
        return self.once(name, redistribute.all_gather_optional, x, context.group, moves=moves)

    def spread(self, columns: fx.Node, like: fx.Node | None, rows: sympy.Expr, counts: fx.Node | None) -> fx.Node:
        """The call's result out of this rank's columns of it; `rows` is the number of rows on one rank."""
        group, num_columns = self.context.group, self._num_columns()
        name = f"{self.call.node.name}_rows"
        if not self.sharded:
            return self._own_rows(columns, like, counts)
        moves = self.spread_moves(rows)
        if not self.context.batch_sharded:
            return self.add(name, redistribute.gather_columns, columns, num_columns, group, at=self.at, moves=moves)
        arguments = (columns, like, counts) if self.ragged else (columns, like)
        function = ragged.rearrange_ragged if self.ragged else redistribute.rearrange_columns
        return self.add(name, function, *arguments, num_columns, group, moves=moves, **self._features())

    def _own_rows(self, columns: fx.Node, like: fx.Node | None, counts: fx.Node | None) -> fx.Node:
        """The call's result where every rank has computed all of it."""
        if not self.context.batch_sharded:
            return columns
        name, group = f"{self.call.node.name}_rows", self.context.group
        if self.ragged:
            return self.add(name, ragged.own_rows_ragged, columns, like, counts, group)
        return self.add(name, redistribute.own_rows, columns, like, group)

    def spread_moves(self, rows: sympy.Expr) -> list[wire.Move]:
        """What `spread` puts on the wire."""
        return wire.spread(
            rows,
            self._num_columns(),
            self.result_itemsizes(),
            batch_sharded=self.context.batch_sharded,
            gradient=self.call.result in self.differentiable,
            ragged=self.ragged,
        )

    def result_itemsizes(self) -> tuple[int, int]:
        """Bytes of an element of the call's result that travels, and of its gradient."""
        itemsize = itemsize_of(self.call.result, self.weight.dtype)
        forward, backward = (itemsize if d is None else min(itemsize, d.itemsize) for d in self.context.wire)
        return forward, backward

    def lookup_options(self) -> dict[str, Any]:
        """The options of a lookup that differ from their defaults; a padding row counts from the first row."""
        options = self.call.options
        chosen: dict[str, Any] = {name: True for name in ("scale_grad_by_freq", "sparse") if options[name]}
        if options["padding_idx"] is not None:
            chosen["padding_idx"] = options["padding_idx"] % self.weight.size(0)
        return chosen

    def lookup_shard(self, ids: fx.Node) -> fx.Node:
        """This rank's part of the table, the rows that `ids` look up renormed if the layer has a max_norm."""
        parameter, options = self.call.weight, self.call.options
        if options["max_norm"] is None:
            return self.shard(parameter)
        if self.sharded:
            rows = rows_of(self.call.input) * (W if self.context.batch_sharded else 1)
            self.note([("all_reduce", FORWARD, rows * norm_dtype(self.weight.dtype).itemsize)])
        group = self.context.group if self.sharded else None
        norm = (float(options["max_norm"]), float(options["norm_type"]))
        return self.shard(self.add(f"{parameter.name}_renormed", renorm, parameter, ids, *norm, group, at=self.at))

    def note(self, made: Iterable[wire.Move]) -> None:
        """Notes collectives."""
        self.traffic.extend(traffic(*move) for move in made)

    def replace(self, out: fx.Node) -> None:
        """Puts `out` in the place of the call's result, and takes the call's nodes out of the graph."""
        graph = self.scope.graph_module.graph
        result, node = self.call.result, self.call.node
        if "val" in result.meta:
            out.meta["val"] = result.meta["val"]
        if result in self.differentiable:
            self.differentiable.add(out)
        result.replace_all_uses_with(out)
        for unused in [*node.users, node]:
            graph.erase_node(unused)

    def _num_columns(self) -> int:
        return self.weight.size(0 if self.call.op == LINEAR else 1)

    def _where(self) -> dict[str, str]:
        return {} if self.checked else {"at": self.at}

    def _features(self) -> dict[str, int]:
        return {"feature_dims": self.feature_dims} if self.feature_dims else {}

    def _gather_moves(self, x: fx.Node) -> list[wire.Move]:
        nbytes = rows_of(x) * itemsize_of(x, self.weight.dtype)
        return wire.gathered(nbytes, batch_sharded=self.context.batch_sharded, gradient=x in self.differentiable)
