"""What the graphs of a model tell a planner: the sizes of every site, and which layers hand columns to which."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import fx, nn

from autoshard.capture import Capture, Region
from autoshard.choices import Use, Weight
from passes.column_flow import Feed, find_feeds
from passes.layout import id_dtype
from passes.pipeline import differentiable_nodes
from passes.plan import COLWISE, ROWWISE
from passes.sites import EMBEDDING, EMBEDDING_BAG, LINEAR, Call, Scope, calls, scopes


def weight_of(name: str, parameter: nn.Parameter, uses: tuple[Use, ...], allowed: tuple[str, ...]) -> Weight:
    """The facts of a parameter that is used so and may have these strategies."""
    table = not uses or any(use.op != LINEAR for use in uses)
    height, width = (1, parameter.numel()) if parameter.dim() != 2 else tuple(parameter.shape)
    if not table:
        height, width = width, height
    return Weight(
        name,
        height,
        width,
        tuple(dataclasses.replace(use, tied=table and use.op == LINEAR) for use in uses),
        allowed,
        parameter.dtype.itemsize,
        id_dtype(height).itemsize,
        parameter.requires_grad,
    )


def example_batch(capture: Capture) -> int | None:
    """Rows of the example inputs: the first dimension of the first tensor that goes into the model."""
    for region in capture.regions:
        if not region.path:
            for node in region.graph.graph.find_nodes(op="placeholder"):
                shape = _shape(node)
                if shape:
                    return shape[0]
    return None


def _shape(node: object) -> tuple[int, ...] | None:
    """The shape of a node's value in the example, or None if there was none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(int(size.node.hint or 1) if isinstance(size, torch.SymInt) else int(size) for size in value.shape)


def _regions(capture: Capture) -> Iterator[Region]:
    """Those that run in a training step."""
    modes = {(region.path, region.mode) for region in capture.regions}
    for region in capture.regions:
        if region.mode is not False or (region.path, True) not in modes:
            yield region


def uses(
    capture: Capture,
    canonical: Mapping[str, str],
    parameters: Mapping[str, nn.Parameter],
    batch: int | None,
    ids_per_bag: float,
) -> dict[str, tuple[Use, ...]]:
    """First name of a weight -> its sites in a training step.

    Args:
        capture: normalized graphs.
        canonical: every name of a parameter -> the first.
        parameters: of the model, by name.
        batch: rows of the example inputs, None without any.
        ids_per_bag: where the graphs do not tell.
    """
    found: dict[str, list[Use]] = {}
    of_layers: dict[str, list[Use]] = {}
    for region in _regions(capture):
        for scope in scopes(region.graph, region.path):
            carried = differentiable_nodes(scope, inputs=bool(region.path))
            made = list(calls(scope))
            shared = Counter((call.input, call.op == LINEAR) for call in made)
            for call in made:
                sharers = shared[call.input, call.op == LINEAR]
                use = _use(call, scope, parameters, batch, ids_per_bag)
                use = dataclasses.replace(use, sharers=sharers, gradient=call.op == LINEAR and call.input in carried)
                into = of_layers if region.is_layer else found
                into.setdefault(canonical[scope.parameters[call.weight]], []).append(use)
    return {name: tuple(found.get(name) or of_layers[name]) for name in {**of_layers, **found}}


def _use(
    call: Call, scope: Scope, parameters: Mapping[str, nn.Parameter], batch: int | None, ids_per_bag: float
) -> Use:
    shape, rows = _shape(call.input), batch or 1
    offsets, weights = call.options.get("offsets"), call.options.get("per_sample_weights")
    size = parameters[scope.parameters[call.weight]].dtype.itemsize
    use = Use(
        call.op,
        ids=ids_per_bag if call.op == EMBEDDING_BAG else 1.0,
        offsets=int(isinstance(offsets, fx.Node)),
        sample_bytes=size if isinstance(weights, fx.Node) else 0,
    )
    if shape is None or batch is None:
        return use
    numel = float(torch.Size(shape).numel())
    if call.op == EMBEDDING:
        return dataclasses.replace(use, results=numel / rows)
    if call.op == LINEAR:
        return dataclasses.replace(use, results=numel / (shape[-1] or 1) / rows)
    bags = shape[0]
    if isinstance(offsets, fx.Node):
        given = _shape(offsets)
        if given is None:
            return use
        bags = given[0] - int(bool(call.options["include_last_offset"]))
    return dataclasses.replace(use, results=bags / rows, ids=numel / max(bags, 1))


def feeds(
    capture: Capture,
    canonical: Mapping[str, str],
    parameters: Mapping[str, nn.Parameter],
    weights: Mapping[str, Weight],
) -> list[Feed]:
    """What goes by column from one layer to the next, where the weights may be sharded so and have no other use.

    Args:
        capture: normalized graphs.
        canonical: every name of a parameter -> the first.
        parameters: of the model, by name.
        weights: by first name.

    Returns:
        The feeds, by first names.
    """
    regions = [region for region in _regions(capture) if not region.is_layer]
    found = [
        dataclasses.replace(
            feed,
            sources=tuple(canonical[name] for name in feed.sources),
            linears=tuple(canonical[name] for name in feed.linears),
        )
        for region in regions
        for feed in find_feeds(region.graph, parameters, region.path)
    ]
    out = Counter(name for feed in found for name in feed.sources)
    into = Counter(name for feed in found for name in feed.linears)

    def fits(feed: Feed) -> bool:
        columns = all(COLWISE in weights[n].strategies and out[n] == len(weights[n].uses) for n in feed.sources)
        rows = all(ROWWISE in weights[n].strategies and into[n] == len(weights[n].uses) for n in feed.linears)
        return columns and rows

    return [feed for feed in found if fits(feed)]
