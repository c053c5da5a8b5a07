"""From sites to a plan: which parameters are sharded, and for every one that is not, why.

A parameter is sharded along its feature axis only if every use of it is a site that takes it so. A weight and its bias
are decided together, but that of a linear which is sharded along its input axis ("rowwise"): it is added whole, once.
Everything else is replicated, with the reason in its row.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping

import torch
from torch import nn

from autoshard import ownership, rowwise
from autoshard.auto_plan import AutoPlan, Decided, allowed_strategies, decide, groups_of
from autoshard.capture import Capture
from autoshard.choices import Group, Setting
from autoshard.facts import Facts, gather_facts
from passes.errors import PlanError, describe
from passes.plan import COLWISE, REPLICATE, ROWWISE, STRATEGIES, Colwise, PlanRow, ShardingPlan
from passes.sites import LAYER_TYPES, LINEAR, Site

Strategy = str | Colwise
AUTO, PAIRED = "auto", "paired"
NAMED = (AUTO, COLWISE, PAIRED)
PlanSpec = str | AutoPlan | ShardingPlan | Mapping[str, Strategy]

_LAYERS = tuple(LAYER_TYPES)
_BATCH_MIXING = (nn.modules.batchnorm._BatchNorm,)


def feature_dim(op: str) -> int:
    """The feature axis of a weight: dim 0 of a linear's (out, in), dim 1 of a table's (V, D)."""
    return 0 if op == LINEAR else 1


def make_plan(
    model: nn.Module,
    capture: Capture,
    spec: PlanSpec,
    world_size: int,
    *,
    batch_sharded: bool = True,
    ragged: Collection[str] = (),
    device_type: str = "cpu",
) -> ShardingPlan:
    """The plan for a captured model.

    Args:
        model: the model, still with whole parameters.
        capture: its graphs.
        spec: "colwise" (shard whatever has a feature axis), "paired" (the same, but rowwise the linears that take
            columns as they are), an AutoPlan (by estimated time; "auto" is one of defaults), a ShardingPlan, or globs
            over parameter names -> strategy, of which the first that matches counts; what no glob matches is
            replicated.
        world_size: ranks in the mesh.
        batch_sharded: True if each rank has its own batch.
        ragged: the weights at whose sites the ranks' batches may differ in size.
        device_type: of the mesh.

    Raises:
        PlanError: for a strategy that does not exist, a glob that matches nothing, a weight that is not floating
            point, a parameter that is asked for by its full name and cannot be sharded, one that is wanted on some
            of the ranks and cannot be, or one that is wanted rowwise and is no linear's; for a model that does not fit.
    """
    facts = gather_facts(model, capture)
    weights = planned_weights(model, facts)
    for name in weights:
        _require_floating_point(name, facts)
    decided = Decided()
    if spec == AUTO:
        spec = AutoPlan()
    if isinstance(spec, AutoPlan):
        groups, setting = searched_groups(
            spec,
            capture,
            facts,
            weights,
            world_size,
            batch_sharded=batch_sharded,
            ragged=ragged,
            device_type=device_type,
        )
        decided = decide(spec, capture, groups, setting)
        obstructed = {name: why for name in weights if (why := _obstacle(name, facts)) is not None}
        wanted = {name: (decided.strategies[name], obstructed.get(name, decided.reasons[name])) for name in weights}
    else:
        wanted = _wanted(spec, weights, facts)
    if spec == PAIRED:
        free = {name for name in weights if _obstacle(name, facts) is None}.difference(ragged)
        for name, why in rowwise.pair_rowwise(capture, facts.canonical, facts.parameters, free, world_size).items():
            wanted[name] = ROWWISE, f'plan "{PAIRED}", {why}'
    by_rows = _by_rows(wanted, facts)
    obstacles = {name: _obstacle(name, facts, by_rows) for name in weights}
    for name in weights:
        (want, source), uses = wanted[name], facts.sites.get(name, ())
        if isinstance(want, Colwise):
            ownership.require_possible(name, want, source, uses, obstacles[name], world_size, batch_sharded)
    strategies = {name: _strategy(name, wanted[name][0], obstacles[name], by_rows) for name in weights}
    followed = _decide_together(strategies, facts)
    rows = []
    for name in weights:
        strategy, (want, source) = strategies[name], wanted[name]
        if strategy != REPLICATE:
            dim = _sharded_dim(name, facts, by_rows)
            columns = facts.parameters[name].size(dim)
            ranks = ownership.owners(want, columns, world_size)
            kind = "input columns" if strategy == ROWWISE else "columns"
            reason = f"{source}: {columns} {kind}, {-(-columns // len(ranks or range(world_size)))} per rank"
            reason += ownership.reason(want, ranks, world_size, facts.parameters[name].size(0))
            if len({feature_dim(site.op) for site in facts.sites[name]}) > 1:
                reason += "; tied: the linear takes its input columns"
        else:
            dim, ranks = None, None
            reason = source if want == REPLICATE else obstacles[name] or followed.get(name, source)
        explanation = decided.explanations.get(name, "")
        rows.append(_row(name, strategy, dim, ranks, reason, explanation, facts))
    return ShardingPlan(tuple(rows), world_size, (*decided.notes, *_notes(model, capture)))


def searched_groups(
    spec: AutoPlan,
    capture: Capture,
    facts: Facts,
    weights: list[str],
    world_size: int,
    *,
    batch_sharded: bool,
    ragged: Collection[str],
    device_type: str,
) -> tuple[list[Group], Setting]:
    """What an automatic plan chooses strategies for, and what it goes by; the arguments are those of `make_plan`."""
    allowed = {
        name: allowed_strategies(facts.sites.get(name, ()), _obstacle(name, facts), ragged=name in ragged)
        for name in weights
    }
    return groups_of(
        spec,
        capture,
        facts.parameters,
        facts.canonical,
        allowed,
        _pairs(facts, ()),
        world_size=world_size,
        batch_sharded=batch_sharded,
        device_type=device_type,
    )


def _sharded_dim(name: str, facts: Facts, by_rows: Collection[str]) -> int:
    """The feature axis, or the input axis of what is in `by_rows`.

    A table that is tied to a linear keeps its feature axis, which is the linear's input axis.
    """
    if facts.parameters[name].dim() == 1:
        return 0
    return 1 if name in by_rows else max(feature_dim(site.op) for site in facts.sites[name])


def _by_rows(wanted: Mapping[str, tuple[Strategy, str]], facts: Facts) -> frozenset[str]:
    """The linears' weights that are wanted rowwise, and can be.

    Raises:
        PlanError: for what is wanted rowwise and is no linear's weight, nor the bias of one that is.
    """
    chosen = {name: source for name, (want, source) in wanted.items() if want == ROWWISE}
    weights: set[str] = set()
    for name, source in chosen.items():
        sites = facts.sites.get(name, ())
        rowwise.require_linear(name, source, [s for s in sites if facts.canonical[s.weight] not in chosen], "a bias")
        rowwise.require_linear(name, source, [s for s in sites if s.op != LINEAR], "a table")
        weights.update(facts.canonical[site.weight] for site in sites)
    return frozenset(name for name in weights if _obstacle(name, facts) is None)


def _strategy(name: str, want: Strategy, obstacle: str | None, by_rows: Collection[str]) -> str:
    if want == REPLICATE or obstacle is not None:
        return REPLICATE
    return ROWWISE if name in by_rows else COLWISE


def planned_weights(model: nn.Module, facts: Facts) -> list[str]:
    """The parameters that get a row, in the order of the model."""
    layers = {
        facts.canonical[f"{path}.{name}" if path else name]
        for path, module in model.named_modules()
        if isinstance(module, _LAYERS)
        for name, _ in module.named_parameters(recurse=False)
    }
    chosen = layers | set(facts.sites)
    return [name for name in dict.fromkeys(facts.canonical.values()) if name in chosen]


def _require_floating_point(name: str, facts: Facts) -> None:
    dtype = facts.parameters[name].dtype
    if not dtype.is_floating_point:
        sites = facts.sites.get(name)
        where = f" ({sites[0].where})" if sites and sites[0].where else ""
        raise PlanError(
            describe(
                f"{name}{where}",
                f"the weight is of {dtype}",
                "a floating point weight",
                "Dequantize the layer, or leave it out of the model that is sharded.",
            )
        )


def _wanted(spec: PlanSpec, weights: list[str], facts: Facts) -> dict[str, tuple[Strategy, str]]:
    """For each parameter the strategy that the person asks for, and where that stands."""
    if isinstance(spec, str):
        if spec not in (COLWISE, PAIRED):
            raise _unknown_strategy("plan", spec, NAMED)
        return dict.fromkeys(weights, (COLWISE, f'plan "{spec}"'))
    if isinstance(spec, ShardingPlan):
        spec = _check_rows(spec, facts)
    elif not isinstance(spec, Mapping):
        raise _unknown_strategy("plan", spec, (*NAMED, "an AutoPlan", "a ShardingPlan", "a mapping"))
    return _match_globs(spec, weights, facts)


def _check_rows(plan: ShardingPlan, facts: Facts) -> dict[str, Strategy]:
    for row in plan.rows:
        parameter = facts.parameters.get(row.parameter)
        if parameter is None or tuple(parameter.shape) != row.shape:
            found = "the model has no such parameter" if parameter is None else f"it is {tuple(parameter.shape)}"
            raise PlanError(
                describe(
                    f"plan row {row.parameter!r}",
                    found,
                    f"a parameter of shape {row.shape}",
                    "Use a plan that was made for this model.",
                )
            )
    return {row.parameter: row.strategy if row.ranks is None else Colwise(row.ranks) for row in plan.rows}


def _match_globs(spec: Mapping[str, Strategy], weights: list[str], facts: Facts) -> dict[str, tuple[Strategy, str]]:
    for glob, strategy in spec.items():
        if strategy not in STRATEGIES and not isinstance(strategy, Colwise):
            raise _unknown_strategy(f"plan entry {glob!r}", strategy, STRATEGIES)
        if not any(_matches(name, glob, facts) for name in facts.parameters):
            raise PlanError(
                describe(
                    f"plan entry {glob!r}",
                    "it matches no parameter of the model",
                    f"a glob over parameter names such as {', '.join(weights[:3])}",
                    "Correct the name, or take the entry out.",
                )
            )
    wanted: dict[str, tuple[Strategy, str]] = {}
    for name in weights:
        names = [alias for alias, first in facts.canonical.items() if first == name]
        hit = next((g for g in spec if any(_matches(n, g, facts) for n in names)), None)
        wanted[name] = (REPLICATE, "no entry of the plan names it") if hit is None else (spec[hit], f"plan {hit!r}")
    by_rows = _by_rows(wanted, facts)
    for glob, strategy in spec.items():
        if strategy != REPLICATE and glob in facts.parameters:
            _require_shardable(glob, facts, by_rows)
    return wanted


def _matches(name: str, entry: str, facts: Facts) -> bool:
    """An entry that is the full name of a parameter means that parameter only, whatever characters are in it."""
    return name == entry if entry in facts.parameters else fnmatch.fnmatchcase(name, entry)


def _require_shardable(name: str, facts: Facts, by_rows: Collection[str]) -> None:
    obstacle = _obstacle(facts.canonical[name], facts, by_rows)
    if obstacle is not None:
        raise PlanError(
            describe(
                f"plan entry {name!r}",
                f"the parameter cannot be sharded by column: {obstacle}",
                "the weight of an embedding, embedding_bag or linear",
                'Ask for "replicate", or take the entry out.',
            )
        )


def _unknown_strategy(place: str, found: object, allowed: tuple[str, ...]) -> PlanError:
    return PlanError(
        describe(
            place,
            f"{found!r} is no strategy",
            f"one of {', '.join(map(str, allowed))}",
            "Correct the plan.",
        )
    )


def _obstacle(name: str, facts: Facts, by_rows: Collection[str] = ()) -> str | None:
    """Why a parameter cannot be sharded, or None if it can; `by_rows` are the weights whose input axis is sharded."""
    parameter, sites = facts.parameters[name], facts.sites.get(name, ())
    if name in facts.readers:
        return f"read by the code of {', '.join(facts.readers[name])}, which runs as it is"
    if not sites:
        owner = name.rpartition(".")[0]
        return f"no traced layer uses it ({facts.kept[owner]})" if owner in facts.kept else "no traced layer uses it"
    if facts.other_uses.get(name):
        use = facts.other_uses[name][0]
        return f"also used by {use.op}" + (f" at {use.where}" if use.where else "")
    as_bias = [site for site in sites if _is_bias(name, site, facts)]
    if as_bias and len(as_bias) < len(sites):
        return "used as a weight and as a bias"
    if as_bias:
        partial = [w for site in as_bias if _sharded_dim(w := facts.canonical[site.weight], facts, by_rows) == 1]
        if partial:
            kind = "is sharded by input column" if partial[0] in by_rows else "is tied to a table"
            return f"the bias of a linear that {kind}: added once, after the sum over ranks"
        outs = {facts.parameters[site.weight].shape[:1] for site in as_bias}
        return None if outs == {parameter.shape} else "a bias that is broadcast has no feature axis"
    if parameter.dim() != 2:
        return f"a weight of {parameter.dim()} dimension has no feature axis"
    return None


def _is_bias(name: str, site: Site, facts: Facts) -> bool:
    return site.bias is not None and facts.canonical[site.bias] == name


def _decide_together(strategies: dict[str, str], facts: Facts) -> dict[str, str]:
    """Replicates, until nothing changes, a weight or bias whose partner is replicated; returns the reasons."""
    reasons: dict[str, str] = {}
    by_rows = {name for name, strategy in strategies.items() if strategy == ROWWISE}
    pairs = _pairs(facts, by_rows)
    changed = True
    while changed:
        changed = False
        for pair in sorted(pairs):
            if len({strategies[name] for name in pair}) > 1:
                cause = next(name for name in pair if strategies[name] == REPLICATE)
                follower = next(name for name in pair if strategies[name] != REPLICATE)
                strategies[follower] = REPLICATE
                reasons[follower] = f"as {cause}, which it is used with"
                changed = True
    return reasons


def _pairs(facts: Facts, by_rows: Collection[str]) -> set[tuple[str, str]]:
    """Weights and biases that are decided together."""
    return {
        (weight, facts.canonical[site.bias])
        for sites in facts.sites.values()
        for site in sites
        if site.bias is not None and _sharded_dim(weight := facts.canonical[site.weight], facts, by_rows) == 0
    }


def _row(
    name: str,
    strategy: str,
    dim: int | None,
    ranks: tuple[int, ...] | None,
    reason: str,
    explanation: str,
    facts: Facts,
) -> PlanRow:
    parameter = facts.parameters[name]
    sites = facts.sites.get(name, ())
    return PlanRow(
        parameter=name,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        strategy=strategy,
        dim=dim,
        ranks=ranks,
        sites=tuple(dict.fromkeys(f"{site.op} {site.module or site.weight}" for site in sites)),
        reason=reason,
        explanation=explanation,
        sparse_gradient=any(("sparse", True) in site.options for site in sites),
        aliases=tuple(alias for alias, first in facts.canonical.items() if first == name and alias != name),
    )


def _notes(model: nn.Module, capture: Capture) -> tuple[str, ...]:
    kept = [f"{path or 'the model'} runs as it is: {why}" for path, why in capture.kept.items()]
    mixing = [
        f"{path} ({type(module).__name__}) sees each rank's own rows in training, as under DDP"
        for path, module in model.named_modules()
        if isinstance(module, _BATCH_MIXING) and not isinstance(module, torch.nn.SyncBatchNorm)
    ]
    return (*capture.notes, *kept, *mixing)
