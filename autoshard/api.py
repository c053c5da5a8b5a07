"""autoshard(): a plain model goes in, the same model comes out, sharded over a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard import forwards, parameters, torchrec_modules
from autoshard.agreement import agree
from autoshard.capture import Capture, capture
from autoshard.diff import GraphDiff, RegionDiff, readable_code
from autoshard.export import capture_export
from autoshard.facts import gather_facts
from autoshard.materialize import check_initialisable
from autoshard.mesh import owner_meshes, resolve_mesh
from autoshard.planner import PlanSpec, make_plan
from autoshard.raggedness import Ragged, covers, ragged_weights
from passes.errors import AutoshardError, CaptureError, PlanError, describe
from passes.graph_pass import Context
from passes.layout import Wire
from passes.ops.redistribute import MEAN, NONE, SUM
from passes.optimize.batch_lookups import Stacks
from passes.pipeline import normalize, shard_graph
from passes.plan import ShardingPlan
from passes.rewrite.parameters import edit as local_edit

ExchangeDtype = torch.dtype | Wire | None
_EXCHANGE_DTYPES = (torch.bfloat16, torch.float16, None)
_RECORD = "_autoshard_record"
M = TypeVar("M", bound=nn.Module)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything that `autoshard()` decides, before it changes the model."""

    capture: Capture
    plan: ShardingPlan
    diff: GraphDiff
    exposed: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Record:
    """What a sharded model knows about itself."""

    plan: ShardingPlan
    diff: GraphDiff
    mesh: DeviceMesh


def autoshard(
    model: M,
    mesh: DeviceMesh | None = None,
    plan: PlanSpec = "auto",
    *,
    example_inputs: Any = None,
    input_placement: Placement = Shard(0),
    gradient_reduction: str = MEAN,
    ragged: Ragged = False,
    exchange_dtype: ExchangeDtype = None,
) -> M:
    """Shards a model's embedding, embedding_bag and linear layers by column. Collective over the mesh.

    The model is changed in place and returned: its parameters become DTensors under their own names, its layers
    compute on this rank's columns. Parameters must be equal on all ranks, or on the meta device. Call it before
    `torch.compile` and before the optimizer is built, and do not wrap the result in DDP: gradients are reduced inside
    of the graph.

    Args:
        model: any module. Batch norm in training sees each rank's own rows, as under DDP.
        mesh: 1-D; all ranks of the default process group if None.
        plan: "auto" chooses by the estimated time of a step and the memory of a rank, and may leave a small model
            whole; an `AutoPlan` says what the estimate goes by. "colwise" shards whatever has a feature axis along it;
            "paired" does, but a linear that can take the columns of what feeds it as they are is sharded along its
            input axis. A ShardingPlan; or {glob of parameter names: "colwise" | "rowwise" | "replicate" |
            Colwise(ranks=...)}, the first glob that matches counts, what none matches is replicated. "rowwise" shards
            the input axis of a linear's weight; its bias stays whole. `Colwise(ranks=(2, 5))` puts the columns of a
            table on these ranks of the mesh only.
        example_inputs: a tuple of arguments, or (args, kwargs). With them the model is captured by `torch.export`, its
            batch dimension dynamic, and the diff knows every shape.
        input_placement: `Shard(0)`: each rank calls the model with its own batch and gets the result of that;
            `Replicate()`: all ranks call it with the same batch.
        gradient_reduction: for `Shard(0)`, "mean" gives the gradient of the mean of the ranks' losses (as DDP does),
            "sum" that of their sum.
        ragged: True if the ranks' batches may differ in size (rows, ids, bags): their sizes travel before the values,
            with one host synchronisation per layer. Otherwise all ranks' batches must be of the same size. Globs over
            module paths or names of weights for the layers of which that is so, if it is not so for all.
        exchange_dtype: torch.bfloat16 or torch.float16, in which the layers' results and their gradients travel where
            they are wider; a pair of these or None, for results and for gradients. Each number is rounded once: for
            bfloat16 by at most 2^-8 of its size, for float16 by 2^-11 between 6e-5 and 65504, above which it is
            infinite. Ids, inputs, sums over the ranks and what belongs to parameters travel as they are.

    Returns:
        The model.

    Raises:
        AutoshardError: on every rank of the mesh; its subclasses say what was wrong.
    """
    mesh = resolve_mesh(mesh, model)
    settings = Settings(
        mesh.get_group().group_name,
        mesh.size(),
        input_placement,
        gradient_reduction,
        ragged,
        exchange_dtype,
        mesh.device_type,
    )

    def decide() -> Prepared:
        prepared = prepare(model, plan, example_inputs, settings)
        check_initialisable(model)
        return prepared

    prepared = agree(mesh, decide, _text)
    install(model, prepared, mesh, owner_meshes(mesh, prepared.plan), settings)
    model.__dict__[_RECORD] = Record(prepared.plan, prepared.diff, mesh)
    return model


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of one `autoshard()` call, and the group it shards over."""

    group: str
    world_size: int
    input_placement: Placement
    gradient_reduction: str
    ragged: Ragged
    exchange_dtype: ExchangeDtype = None
    device_type: str = "cpu"

    @property
    def wire(self) -> Wire:
        """In which dtypes results and their gradients travel."""
        return self.exchange_dtype if isinstance(self.exchange_dtype, tuple) else (self.exchange_dtype,) * 2

    @property
    def batch_sharded(self) -> bool:
        return isinstance(self.input_placement, Shard)

    @property
    def reduction(self) -> str:
        return self.gradient_reduction if self.batch_sharded else NONE


def prepare(model: nn.Module, plan: PlanSpec, example_inputs: Any, settings: Settings) -> Prepared:
    """Captures, plans and rewrites, without changing the model and without communication."""
    _check_arguments(model, settings)
    captured = capture(model) if example_inputs is None else capture_export(model, example_inputs)
    for region in captured.regions:
        normalize(region.graph)
    facts = gather_facts(model, captured)
    ragged = ragged_weights(settings.ragged, facts) if settings.batch_sharded else frozenset[str]()
    sharding = make_plan(
        model,
        captured,
        plan,
        settings.world_size,
        batch_sharded=settings.batch_sharded,
        ragged=ragged,
        device_type=settings.device_type,
    )
    context = Context(
        sharding,
        settings.group,
        settings.world_size,
        settings.batch_sharded,
        settings.reduction,
        ragged,
        settings.wire,
    )
    diffs: list[RegionDiff] = []
    stacks: Stacks = {}
    for region in captured.regions:
        before = readable_code(region.graph)
        edits = shard_graph(region.graph, context, facts.parameters, region.path, stacks)
        after = readable_code(region.graph)
        diffs.append(RegionDiff(region.path, region.mode, region.is_layer, before, after, tuple(edits)))
    in_graphs = {edit.parameter for diff in diffs for edit in diff.edits} | facts.sites.keys()
    local = [name for name, _ in model.named_parameters() if name not in in_graphs]
    edits = [local_edit(name, facts.parameters[name], context, "", "") for name in local]
    diff = GraphDiff.of(diffs, settings.world_size, tuple(edits))
    return Prepared(captured, sharding, diff, facts.exposed)


def _text(prepared: Prepared) -> str:
    """What has to be equal on all ranks: the plan and the text of every graph."""
    graphs = [f"graph {r.path}\n{r.graph.code}" for r in prepared.capture.regions]
    return "\n".join([prepared.plan.to_json(), *graphs])


def install(
    model: nn.Module,
    prepared: Prepared,
    mesh: DeviceMesh,
    owners: Mapping[tuple[int, ...], DeviceMesh],
    settings: Settings,
) -> None:
    """Gives the model its shards and its graphs."""
    parameters.shard_parameters(model, prepared.plan, mesh, owners)
    by_name = dict(model.named_parameters(remove_duplicate=False))
    sharded = {id(by_name[name]) for name in prepared.plan.sharded}
    graphs: dict[int, dict[bool | None, fx.GraphModule]] = {}
    for region in prepared.capture.regions:
        graphs.setdefault(id(region.module), {})[region.mode] = region.graph
    exposed = {id(model.get_submodule(path)) for path in prepared.exposed}
    for module in list(model.modules()):
        whole = tuple(name for name, p in module._parameters.items() if p is not None and id(p) not in sharded)
        if id(module) in exposed:
            forwards.expose_parameters(module, whole, settings.group, settings.reduction)
        elif id(module) in graphs:
            forwards.use_graph(module, graphs[id(module)], prepared.capture.mode_sensitive if module is model else ())
        elif whole:
            forwards.use_local_parameters(module, whole, settings.group, settings.reduction)
    forwards.share_reads(model)


def sharding_plan(sharded: nn.Module) -> ShardingPlan:
    """The plan that a model was sharded by; `print` shows it as a table.

    Raises:
        AutoshardError: if the model did not come from `autoshard()`.
    """
    return _record(sharded).plan


def graph_diff(sharded: nn.Module) -> GraphDiff:
    """What `autoshard()` changed; `print` shows it as a unified diff, `.summary()` as a table.

    Raises:
        AutoshardError: if the model did not come from `autoshard()`.
    """
    return _record(sharded).diff


def unshard(sharded: M) -> M:
    """The original model with the present weights, whole on every rank. Collective over the mesh.

    Args:
        sharded: a model from `autoshard()`; it is changed in place.

    Returns:
        The model.

    Raises:
        AutoshardError: if the model did not come from `autoshard()`.
    """
    mesh = mesh_of(sharded)
    for module in sharded.modules():
        forwards.restore(module)
    parameters.gather_parameters(sharded, mesh)
    del sharded.__dict__[_RECORD]
    return sharded


def mesh_of(sharded: nn.Module) -> DeviceMesh:
    """The mesh that a model is sharded over.

    Raises:
        AutoshardError: if the model did not come from `autoshard()`.
    """
    return _record(sharded).mesh


def _record(model: nn.Module) -> Record:
    inner = getattr(model, "_orig_mod", model)
    record: Record | None = inner.__dict__.get(_RECORD) if isinstance(inner, nn.Module) else None
    if record is None:
        raise AutoshardError(
            describe(
                type(model).__name__,
                "this is no sharded model",
                "what autoshard() returned",
                "Call autoshard(model) first.",
            )
        )
    return record


def _check_arguments(model: nn.Module, settings: Settings) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError(
            describe("autoshard(model)", f"got a {type(model).__name__}", "an nn.Module", "Pass the model itself.")
        )
    if settings.input_placement not in (Shard(0), Replicate()):
        raise PlanError(
            describe(
                "input_placement",
                f"got {settings.input_placement!r}",
                "Shard(0) or Replicate()",
                "Pass one of these two.",
            )
        )
    if settings.gradient_reduction not in (MEAN, SUM):
        raise PlanError(
            describe(
                "gradient_reduction",
                f"got {settings.gradient_reduction!r}",
                '"mean" or "sum"',
                "Pass one of these two.",
            )
        )
    if len(settings.wire) != 2 or any(dtype not in _EXCHANGE_DTYPES for dtype in settings.wire):
        raise PlanError(
            describe(
                "exchange_dtype",
                f"got {settings.exchange_dtype!r}",
                "torch.bfloat16, torch.float16, None, or a pair of these",
                "Pass one of these: results travel in it forward, their gradients backward.",
            )
        )
    for path, module in model.named_modules():
        _check_module(path or "the model", module)
    if settings.batch_sharded:
        torchrec_modules.require_ragged(model, lambda name: covers(settings.ragged, name))


def _check_module(path: str, module: nn.Module) -> None:
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise CaptureError(
            describe(
                path,
                f"it is wrapped in {type(module).__name__}",
                "a plain module: autoshard() reduces every gradient inside of the graph, DDP would do it again",
                "Pass the module inside (`.module`), and wrap nothing afterwards.",
            )
        )
    if _RECORD in module.__dict__:
        raise CaptureError(
            describe(path, "it is sharded already", "a plain module", "Call autoshard() once, on the whole model.")
        )
    for name, parameter in module._parameters.items():
        if parameter is not None:
            _check_parameter(f"{path}.{name}", parameter)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if type(parameter) is not nn.Parameter:
        raise CaptureError(
            describe(
                name,
                f"it is a {type(parameter).__name__}",
                "a plain nn.Parameter",
                "Shard a model once, before other wrappers.",
            )
        )
    if parameter.grad is not None:
        raise CaptureError(
            describe(name, "it has a gradient", "none", "Call model.zero_grad(set_to_none=True) before autoshard().")
        )
    hooks: Mapping[Any, Any] | None = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    if hooks:
        raise CaptureError(describe(name, "it has a hook", "none", "Register hooks of parameters after autoshard()."))
