"""From a captured model to the facts that a plan is chosen by, and from the choice to reasons for a person."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from autoshard import survey
from autoshard.capture import Capture
from autoshard.choices import Group, Option, Setting, Weight, even_memory, even_seconds, in_setting
from autoshard.cost import OWNED
from autoshard.profile import HardwareProfile, profile_of
from autoshard.search import Chosen, readable, search
from passes.column_flow import Feed
from passes.plan import COLWISE, REPLICATE, ROWWISE, Colwise
from passes.sites import LINEAR, Site

_BATCH_SIZE = 1024
_COMPARED = 3  # options that an explanation compares the chosen one with


@dataclasses.dataclass(frozen=True)
class AutoPlan:
    """What an automatic plan goes by.

    Attributes:
        profile: of the hardware: a `HardwareProfile`, the name of a built-in one, or the path of what
            `python -m autoshard calibrate` wrote. None: "h100-nvlink" for a mesh of CUDA devices, else "cpu-gloo".
        memory_per_rank: bytes for weights, gradients and optimizer states; None for the profile's. Activations need
            room besides.
        batch_size: rows on one rank; None for that of the example inputs, or 1024 without any.
        ids_per_bag: where the example inputs do not tell.
        optimizer_states: tensors of the size of a weight that the optimizer keeps for it: 2 for Adam, 0 for plain SGD.
    """

    profile: HardwareProfile | str | None = None
    memory_per_rank: float | None = None
    batch_size: int | None = None
    ids_per_bag: float = 1.0
    optimizer_states: int = 2


@dataclasses.dataclass(frozen=True)
class Decided:
    """For each weight the strategy, a short reason, and the explanation; notes for the plan."""

    strategies: Mapping[str, str | Colwise] = dataclasses.field(default_factory=dict)
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    explanations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def allowed_strategies(sites: Sequence[Site], obstacle: str | None, *, ragged: bool) -> tuple[str, ...]:
    """The strategies among which a weight or bias is decided.

    Args:
        sites: its uses.
        obstacle: why it cannot be sharded, or None.
        ragged: True if the ranks' batches may differ in size: to send ids would take a host synchronisation, and
            columns are not kept.
    """
    options = {option for site in sites for option in site.options}
    if obstacle is not None:
        return (REPLICATE,)
    if ("sparse", True) in options:  # the gradient of a whole one would be gathered, entry by entry
        return (COLWISE,)
    if not ragged and all(site.op == LINEAR for site in sites):
        return (COLWISE, ROWWISE, REPLICATE)
    if not ragged and all(site.op != LINEAR for site in sites) and all(name != "max_norm" for name, _ in options):
        return (COLWISE, REPLICATE, OWNED)
    return (COLWISE, REPLICATE)


def groups_of(
    plan: AutoPlan,
    capture: Capture,
    parameters: Mapping[str, nn.Parameter],
    canonical: Mapping[str, str],
    allowed: Mapping[str, tuple[str, ...]],
    together: Collection[tuple[str, str]],
    *,
    world_size: int,
    batch_sharded: bool,
    device_type: str,
) -> tuple[list[Group], Setting]:
    """What a strategy is chosen for, and what the choice goes by.

    Args:
        plan: what is asked for.
        capture: normalized graphs.
        parameters: of the model, by name.
        canonical: every name of a parameter -> the first.
        allowed: first name -> the strategies that the weight or bias may have, in the order of the model.
        together: pairs of a weight and a bias, by first names, that have one strategy.
        world_size: ranks.
        batch_sharded: True if each rank has its own batch.
        device_type: of the mesh.

    Raises:
        PlanError: if there is no such profile.
    """
    batch = survey.example_batch(capture)
    setting = Setting(
        world_size,
        profile_of(plan.profile, device_type),
        plan.batch_size or batch or _BATCH_SIZE,
        batch_sharded,
        plan.optimizer_states,
        _reduced(parameters, canonical, allowed) if batch_sharded else 0.0,
    )
    uses = survey.uses(capture, canonical, parameters, batch, plan.ids_per_bag)
    weights = {name: survey.weight_of(name, parameters[name], uses.get(name, ()), own) for name, own in allowed.items()}
    return group_weights(weights, together, survey.feeds(capture, canonical, parameters, weights)), setting


def decide(plan: AutoPlan, capture: Capture, groups: Sequence[Group], setting: Setting) -> Decided:
    """Chooses a strategy for each weight.

    Raises:
        PlanError: if the model does not fit.
    """
    budget = setting.profile.memory if plan.memory_per_rank is None else plan.memory_per_rank
    chosen = search(groups, setting, budget)
    known = survey.example_batch(capture) is not None
    origin = "AutoPlan(batch_size)" if plan.batch_size else "example_inputs" if known else "assumed"
    notes = (
        f'plan "auto": embeddings, linears and their collectives are estimated at {_time(chosen.seconds)} of a step',
        f"the fullest rank holds {readable(chosen.memory)} of {readable(budget)}, with gradients and {setting.states} "
        "optimizer states per weight",
        f"estimated for {setting.batch_size} rows per rank ({origin}) by the profile {setting.profile.name}",
    )
    return _decided(groups, chosen, setting, budget, notes)


def group_weights(
    weights: Mapping[str, Weight], together: Collection[tuple[str, str]], feeds: Sequence[Feed]
) -> list[Group]:
    """The weights in groups that are decided together, in the order of the weights.

    A member of a group is what has one strategy. The layers of a feed are one group; in a chain of layers every other
    feed is, because columns that go into a linear leave it as rows.
    """
    first = {name: name for name in weights}

    def root(name: str) -> str:
        while first[name] != name:
            name = first[name]
        return name

    order = {name: place for place, name in enumerate(weights)}
    for pair in sorted(together):
        one, other = sorted((root(pair[0]), root(pair[1])), key=lambda name: order[name])
        first[other] = one
    members: dict[str, list[Weight]] = {}
    for name, weight in weights.items():
        members.setdefault(root(name), []).append(weight)
    # What is used comes first: a member has the strategies of its first weight.
    found = {name: tuple(sorted(own, key=lambda w: (not w.uses, order[w.name]))) for name, own in members.items()}
    grouped: dict[str, Group] = {}
    taken: set[str] = set()
    for feed in feeds:
        sources, linears = (tuple(dict.fromkeys(map(root, names))) for names in (feed.sources, feed.linears))
        names = (*sources, *linears)
        if not {*sources} & {*linears} and not taken & {*names}:
            taken.update(names)
            group = Group(
                tuple(found[name] for name in names),
                tuple(range(len(sources))),
                tuple(range(len(sources), len(names))),
            )
            grouped[min(names, key=lambda name: order[name])] = group
    for name, member in found.items():
        if name not in taken:
            grouped[name] = Group((member,))
    return [grouped[name] for name in sorted(grouped, key=lambda name: order[name])]


def _reduced(parameters: Mapping[str, nn.Parameter], canonical: Mapping[str, str], decided: Collection[str]) -> float:
    """Bytes of the gradients of what stays whole in any case: norms, parameters of no layer."""
    others = [parameters[name] for name in dict.fromkeys(canonical.values()) if name not in decided]
    return float(sum(p.numel() * p.dtype.itemsize for p in others if p.requires_grad))


def _decided(
    groups: Sequence[Group], chosen: Chosen, setting: Setting, budget: float, notes: tuple[str, ...]
) -> Decided:
    strategies: dict[str, str | Colwise] = {}
    reasons: dict[str, str] = {}
    explanations: dict[str, str] = {}
    for group, option, ranks, others in zip(groups, chosen.options, chosen.ranks, chosen.others, strict=True):
        reason = f'plan "auto", {_time(even_seconds(option, setting))} of a step'
        if others:
            reason += f" ({others[0].name}: {_time(even_seconds(others[0], setting))})"
        text = _explanation(group, option, others, setting, budget - chosen.memory)
        for member, strategy in zip(group.members, option.strategies, strict=True):
            for weight in member:
                strategies[weight.name] = strategy if ranks is None else Colwise(ranks)
                reasons[weight.name], explanations[weight.name] = reason, text
    return Decided(strategies, reasons, explanations, notes)


def _explanation(group: Group, option: Option, others: Sequence[Option], setting: Setting, room: float) -> str:
    lines = [_line("chosen", option, setting)]
    if len(group.weights) > 1:
        lines.append(f"decided together: {', '.join(weight.name for weight in group.weights)}")
    if not others:
        return "\n".join([*lines, "there is no other choice"])
    lines.insert(1, _line("runner-up", others[0], setting))
    changes = (_change(group, option, other, setting, room) for other in others[:_COMPARED])
    change = next((text for text in changes if text), f"no batch size alone would make {others[0].name} faster")
    return "\n".join([*lines, change])


def _change(group: Group, option: Option, other: Option, setting: Setting, room: float) -> str | None:
    """What would have to be different for the other option to be chosen; None if no batch size alone would do."""
    missing = even_memory(other, setting) - even_memory(option, setting) - room
    if even_seconds(other, setting) >= even_seconds(option, setting):
        return _turning_point(group, option, other, setting)
    if missing > 0:
        return f"{other.name} would be taken if each rank had {readable(missing)} more"
    return f"{other.name} takes less by itself, but needs collectives of its own, or loads some ranks only"


def _line(what: str, option: Option, setting: Setting) -> str:
    memory = readable(option.memory) + (" on each of them" if option.owners else " on a rank")
    return f"{what}: {option.name}, {_time(even_seconds(option, setting))} of a step, {memory}"


def _turning_point(group: Group, option: Option, other: Option, setting: Setting) -> str | None:
    """At which batch both take as long. Their times are nearly lines in the batch size, so a few steps find it."""
    rows = setting.batch_size
    for _ in range(4):
        apart, apart_doubled = (_more_seconds(group, other, option, setting, size) for size in (rows, 2 * rows))
        if apart == apart_doubled or (found := round(rows * (1 - apart / (apart_doubled - apart)))) < 1:
            return None
        rows, before = found, rows
        if abs(rows - before) <= rows // 100:
            break
    return f"{other.name} would be faster {'above' if rows > setting.batch_size else 'below'} some {rows} rows per rank"


def _more_seconds(group: Group, option: Option, other: Option, setting: Setting, batch_size: int) -> float:
    """What a step with one option takes more than with the other, in a batch of that size."""
    resized = dataclasses.replace(setting, batch_size=batch_size)
    one, two = (even_seconds(in_setting(group, choice, resized), resized) for choice in (option, other))
    return one - two


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
