"""The fastest plan that fits: one option for each group, and the ranks for tables that are on some of them.

Candidates do not depend on the budget, so that more memory can only let more of them in: it never makes a slower plan.
For each set of strategies that lone layers may have, and for memory levels from the least that the groups need to all
that they could use, groups begin with the option of least memory and take faster ones, those first that save most
seconds for a byte, as long as the level is kept. Each candidate's tables are then put on ranks, the largest first, each
where least is, once by time and once by memory. The fastest that fits the budget is the plan.

Everything is sorted by numbers and then by place, so that every rank finds the same plan.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Sequence

from autoshard.choices import Group, Option, Setting, even_memory, even_seconds, option_of, options, step_seconds
from autoshard.cost import OWNED
from passes.errors import PlanError, describe
from passes.plan import ShardingPlan

_LEVELS_PER_DOUBLING = 2
_DOUBLINGS = 14

# (seconds for a byte, place of the group, number of the step in its frontier, option, bytes)
_Step = tuple[float, int, int, int, float]
_Ranks = tuple[tuple[int, ...] | None, ...]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The plan.

    Attributes:
        options: for each group.
        ranks: for each group, where its columns are; None for all ranks.
        seconds: of a step.
        memory: bytes on the fullest rank.
        others: for each group its other options, the fastest first, as it would be alone.
    """

    options: tuple[Option, ...]
    ranks: _Ranks
    seconds: float
    memory: float
    others: tuple[tuple[Option, ...], ...]


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """Before its tables are on ranks: no placement takes less time or memory than this.

    Attributes:
        seconds: with an owner that has no more than the mean, or one table.
        memory: bytes, likewise.
        step: seconds without what owners do.
        choice: for each group the place of the option.
    """

    seconds: float
    memory: float
    step: float
    choice: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Placed:
    seconds: float
    memory: float
    choice: tuple[int, ...]
    ranks: _Ranks


def search(groups: Sequence[Group], setting: Setting, budget: float) -> Chosen:
    """Chooses an option for each group.

    Args:
        groups: in the order of the model.
        setting: ranks, hardware, batch.
        budget: bytes of memory on one rank.

    Raises:
        PlanError: if no candidate fits; it says how much is missing, and which weights take most.
    """
    found = [options(group, setting) for group in groups]
    candidates = sorted(_candidates(found, setting), key=lambda c: (c.seconds, c.memory, c.choice))
    best: _Placed | None = None
    for candidate in candidates:
        if best is not None and candidate.seconds >= best.seconds:
            break
        if candidate.memory <= budget:
            for placed in _placed(found, candidate, setting):
                if placed.memory <= budget and (best is None or placed.seconds < best.seconds):
                    best = placed
    if best is None:
        raise _too_large(groups, found, candidates, budget, setting)
    chosen = tuple(own[place] for own, place in zip(found, best.choice, strict=True))
    return Chosen(chosen, best.ranks, best.seconds, best.memory, _others(found, chosen, setting))


def estimate(groups: Sequence[Group], setting: Setting, plan: ShardingPlan) -> tuple[float, float]:
    """What a plan takes: the seconds of a step, and the bytes on the fullest rank."""
    chosen, where = [], []
    for group in groups:
        rows = [plan.row(member[0].name) for member in group.members]
        strategies = tuple(row.strategy if row.ranks is None else OWNED for row in rows)
        where.append(rows[0].ranks)
        chosen.append(option_of(group, strategies, len(rows[0].ranks or ()), setting))
    loads, memory = _held(chosen, where, setting)
    return step_seconds(chosen, setting) + max(loads), max(memory)


def _held(
    chosen: Sequence[Option], where: Sequence[tuple[int, ...] | None], setting: Setting
) -> tuple[list[float], list[float]]:
    """For each rank the seconds that it takes as an owner, and the bytes that it holds."""
    everywhere = sum(option.memory for option, ranks in zip(chosen, where, strict=True) if ranks is None)
    loads, memory = [0.0] * setting.ranks, [everywhere] * setting.ranks
    for option, ranks in zip(chosen, where, strict=True):
        for rank in ranks or ():
            loads[rank] += option.load
            memory[rank] += option.memory
    return loads, memory


def _candidates(found: list[list[Option]], setting: Setting) -> list[_Candidate]:
    points = [
        [(even_memory(option, setting), even_seconds(option, setting), place) for place, option in enumerate(own)]
        for own in found
    ]
    kinds = sorted({_kind(option) for own in found for option in own})
    choices: dict[tuple[int, ...], None] = {}
    for size in range(1, len(kinds) + 1):
        for allowed in itertools.combinations(kinds, size):
            among = [
                [point for point, option in zip(own, options, strict=True) if _kind(option) in allowed] or own
                for own, options in zip(points, found, strict=True)
            ]
            choices.update(dict.fromkeys(_choices(among)))
    return [_candidate(found, choice, setting) for choice in choices]


def _kind(option: Option) -> str:
    """What decides whether an option shares its collectives with others: a plan may do without any of that kind."""
    return option.strategies[0] if len(option.strategies) == 1 else "-"


def _choices(points: list[list[tuple[float, float, int]]]) -> Iterator[tuple[int, ...]]:
    start: list[int] = []
    steps: list[_Step] = []
    least = 0.0
    for group, own in enumerate(points):
        frontier = _frontier(own)
        start.append(frontier[0][2])
        least += frontier[0][0]
        for number, (before, after) in enumerate(itertools.pairwise(frontier)):
            steps.append((_gain(before, after), group, number, after[2], after[0] - before[0]))
    steps.sort()
    most = least + sum(step[4] for step in steps)
    level = max(least, 1.0)
    for _ in range(_LEVELS_PER_DOUBLING * _DOUBLINGS):
        yield _within(start, steps, level - least)
        if level >= most:
            return
        level *= 2 ** (1 / _LEVELS_PER_DOUBLING)
    yield _within(start, steps, most)


def _within(start: list[int], steps: list[_Step], room: float) -> tuple[int, ...]:
    choice, done = list(start), [0] * len(start)
    for _, group, number, option, nbytes in steps:
        if number == done[group] and nbytes <= room:
            choice[group], done[group] = option, number + 1
            room -= nbytes
    return tuple(choice)


def _frontier(points: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Of (memory, seconds, place) those on the lower convex hull: from the least memory to the fewest seconds."""
    hull: list[tuple[float, float, int]] = []
    for point in sorted(points):
        if hull and (point[1] >= hull[-1][1] or point[0] == hull[-1][0]):
            continue
        while len(hull) > 1 and _gain(hull[-2], point) <= _gain(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return hull


def _gain(before: tuple[float, float, int], after: tuple[float, float, int]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])


def _candidate(found: list[list[Option]], choice: tuple[int, ...], setting: Setting) -> _Candidate:
    chosen = [own[place] for own, place in zip(found, choice, strict=True)]
    owned = [option for option in chosen if option.owners]
    step, everywhere = step_seconds(chosen, setting), sum(option.memory for option in chosen if not option.owners)
    load = sum(option.load * option.owners for option in owned) / setting.ranks
    memory = sum(option.memory * option.owners for option in owned) / setting.ranks
    load = max([load, *(option.load for option in owned)])
    memory = max([memory, *(option.memory for option in owned)])
    # Sums in another order may round to a little less.
    return _Candidate((step + load) * (1 - 1e-9), (everywhere + memory) * (1 - 1e-9), step, choice)


def _placed(found: list[list[Option]], candidate: _Candidate, setting: Setting) -> Iterator[_Placed]:
    """The candidate with its tables on ranks: balanced by time, and by memory."""
    chosen = {group: own[place] for group, (own, place) in enumerate(zip(found, candidate.choice, strict=True))}
    owned = {group: option for group, option in chosen.items() if option.owners}
    weights = (
        {group: (option.load, option.memory) for group, option in owned.items()},
        {group: (option.memory, option.load) for group, option in owned.items()},
    )
    for weight in weights if owned else weights[:1]:
        ranks = _spread({group: (weight[group], option.owners) for group, option in owned.items()}, setting.ranks)
        where = tuple(ranks.get(group) for group in chosen)
        loads, memory = _held(list(chosen.values()), where, setting)
        yield _Placed(candidate.step + max(loads), max(memory), candidate.choice, where)


def _spread(tables: dict[int, tuple[tuple[float, float], int]], ranks: int) -> dict[int, tuple[int, ...]]:
    """For each table the ranks that hold the least so far; the largest tables first."""
    heap = [(0.0, 0.0, rank) for rank in range(ranks)]
    placed = {}
    for group, (weight, owners) in sorted(tables.items(), key=lambda item: (-item[1][0][0], -item[1][0][1], item[0])):
        taken = [heapq.heappop(heap) for _ in range(owners)]
        placed[group] = tuple(sorted(rank for _, _, rank in taken))
        for one, other, rank in taken:
            heapq.heappush(heap, (one + weight[0], other + weight[1], rank))
    return placed


def _others(found: list[list[Option]], chosen: tuple[Option, ...], setting: Setting) -> tuple[tuple[Option, ...], ...]:
    return tuple(
        tuple(sorted((o for o in own if o is not taken), key=lambda o: (even_seconds(o, setting), o.memory)))
        for own, taken in zip(found, chosen, strict=True)
    )


def _too_large(
    groups: Sequence[Group],
    found: list[list[Option]],
    candidates: list[_Candidate],
    budget: float,
    setting: Setting,
) -> PlanError:
    """How much is missing on which rank, and which weights take most of it there."""
    leanest = min(candidates, key=lambda c: (c.memory, c.seconds, c.choice))
    least = min(_placed(found, leanest, setting), key=lambda placed: (placed.memory, placed.seconds))
    chosen = [own[place] for own, place in zip(found, least.choice, strict=True)]
    _, held = _held(chosen, least.ranks, setting)
    fullest = held.index(max(held))
    there = [
        (-option.memory, place)
        for place, (option, ranks) in enumerate(zip(chosen, least.ranks, strict=True))
        if ranks is None or fullest in ranks
    ]
    most = [
        f"{groups[place].weights[0].name} ({readable(-nbytes)}, {chosen[place].name})"
        for nbytes, place in sorted(there)[:3]
    ]
    return PlanError(
        describe(
            'plan "auto"',
            f"rank {fullest} needs at least {readable(least.memory)} for weights, gradients and {setting.states} "
            f"optimizer states per weight, {readable(least.memory - budget)} too much; most of it: {', '.join(most)}",
            f"at most {readable(budget)} on each of {setting.ranks} ranks",
            "Use more ranks, an optimizer with fewer states (AutoPlan(optimizer_states=...)), or give each rank more "
            "(AutoPlan(memory_per_rank=...)).",
        )
    )


def readable(nbytes: float) -> str:
    """Bytes for a person."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:.0f} bytes"
