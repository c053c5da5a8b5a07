"""What may be done with each group of weights that is decided together, and what each choice costs.

Plain frozen facts go in, numbers come out; no model and no process group is needed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from autoshard.cost import OWNED, Numbers, Q, Sizes, evaluate, site_cost, weight_cost
from autoshard.profile import COLLECTIVES, HardwareProfile
from passes.optimize.merge_collectives import BUCKET_BYTES
from passes.plan import COLWISE, REPLICATE, ROWWISE
from passes.sites import LINEAR

_LARGEST_PRODUCT = 64  # choices of a group; one of more members is decided for all of them alike


@dataclasses.dataclass(frozen=True)
class Use:
    """One site of a weight.

    Attributes:
        op: "embedding", "embedding_bag" or "linear".
        results: for each row of the batch.
        ids: in a bag.
        offsets: for each result.
        sample_bytes: of a weight per sample, 0 if there is none.
        sharers: sites that take the same input.
        gradient: True if a gradient goes back to the input.
        tied: True for a linear with the weight of a table: where that is colwise, the linear takes input columns.
    """

    op: str
    results: float = 1.0
    ids: float = 1.0
    offsets: int = 0
    sample_bytes: int = 0
    sharers: int = 1
    gradient: bool = False
    tied: bool = False


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight, or a bias (height 1, no uses of its own).

    Attributes:
        name: in the model.
        height: rows of a table, input features of a linear.
        width: columns of a table, output features.
        uses: its sites.
        strategies: those it may have.
        itemsize: bytes of an element.
        id_bytes: of an id that travels.
        trained: True if it gets a gradient.
    """

    name: str
    height: int
    width: int
    uses: tuple[Use, ...] = ()
    strategies: tuple[str, ...] = (COLWISE, REPLICATE)
    itemsize: int = 4
    id_bytes: int = 4
    trained: bool = True


@dataclasses.dataclass(frozen=True)
class Group:
    """Weights that are decided together.

    Attributes:
        members: each a weight and what has to have its strategy, as its bias has.
        sources: places of members whose results the linears of the group take through column-wise work only.
        linears: places of these linears.
    """

    members: tuple[tuple[Weight, ...], ...]
    sources: tuple[int, ...] = ()
    linears: tuple[int, ...] = ()

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(itertools.chain.from_iterable(self.members))


@dataclasses.dataclass(frozen=True)
class Setting:
    """What holds for all groups.

    Attributes:
        ranks: in the mesh.
        profile: of the hardware.
        batch_size: rows on one rank.
        batch_sharded: True if each rank has its own.
        states: of the optimizer, for each weight.
        reduced: bytes of gradients, of other parameters than those of the groups, that are reduced in buckets.
    """

    ranks: int
    profile: HardwareProfile
    batch_size: int = 1024
    batch_sharded: bool = True
    states: int = 2
    reduced: float = 0.0


@dataclasses.dataclass(frozen=True)
class Option:
    """One choice for a group.

    Attributes:
        strategies: for each member.
        kept: True if the columns of the sources are what the linears take.
        owners: the number of ranks that hold columns, for tables on some of the ranks; 0 for all.
        seconds: of a step, on every rank; without what is in `messages` and `load`.
        load: seconds on an owner.
        memory: bytes on the busiest rank, or on an owner.
        messages: collectives of its own, in the order of `COLLECTIVES`.
        merged: collectives that it shares with all options that name the same: (collective, what).
        reduced: bytes of gradients that join a bucket.
    """

    strategies: tuple[str, ...]
    kept: bool
    owners: int
    seconds: float
    load: float
    memory: float
    messages: tuple[int, ...]
    merged: frozenset[tuple[str, str]]
    reduced: float

    @property
    def name(self) -> str:
        """For a person."""
        names = [REPLICATE if s == REPLICATE else COLWISE if s == OWNED else s for s in self.strategies]
        where = f" on {self.owners} rank{'s' * (self.owners > 1)}" if self.owners else ""
        return ", ".join(dict.fromkeys(names)) + where + (", columns kept" if self.kept else "")


def options(group: Group, setting: Setting) -> list[Option]:
    """The choices for a group, each once."""
    return [_option(group, *choice, setting) for choice in _choices(group, setting)]


def option_of(group: Group, strategies: tuple[str, ...], owners: int, setting: Setting) -> Option:
    """The choice of these strategies for the members, on so many owners (0: all ranks)."""
    return _option(group, strategies, bool(group.sources) and _keeps(group, strategies), owners, setting)


def in_setting(group: Group, option: Option, setting: Setting) -> Option:
    """The same choice for the same group, in another setting."""
    return _option(group, option.strategies, option.kept, option.owners, setting)


def even_seconds(option: Option, setting: Setting) -> float:
    """Seconds of a step where tables are spread evenly over the ranks, without the latencies that are shared."""
    alone = latency(option.messages, (), 0.0, setting)
    return option.seconds + option.load * option.owners / setting.ranks + alone


def even_memory(option: Option, setting: Setting) -> float:
    """Bytes on a rank where tables are spread evenly over the ranks."""
    return option.memory * option.owners / setting.ranks if option.owners else option.memory


def _choices(group: Group, setting: Setting) -> Iterator[tuple[tuple[str, ...], bool, int]]:
    allowed = [
        tuple(s for s in member[0].strategies if s != OWNED and all(s in weight.strategies for weight in member))
        for member in group.members
    ]
    product = list(itertools.islice(itertools.product(*allowed), _LARGEST_PRODUCT + 1))
    if len(product) > _LARGEST_PRODUCT:
        product = [tuple(s if s in own else own[-1] for own in allowed) for s in (COLWISE, REPLICATE)]
        kept_all = tuple(ROWWISE if place in group.linears else COLWISE for place in range(len(allowed)))
        if all(s in own for s, own in zip(kept_all, allowed, strict=True)):
            product.append(kept_all)
    for strategies in dict.fromkeys(product):
        kept = bool(group.sources) and _keeps(group, strategies)
        yield strategies, kept, 0
    if len(group.members) == 1 and OWNED in group.members[0][0].strategies and setting.batch_sharded:
        table = group.members[0][0]
        owners = 1
        while owners <= min(table.width, setting.ranks - 1):
            yield (OWNED,), False, owners
            if table.width * table.itemsize <= owners * setting.profile.line:
                return  # narrower columns would cost a memory line all the same
            owners *= 2


def _keeps(group: Group, strategies: tuple[str, ...]) -> bool:
    return all(strategies[place] == COLWISE for place in group.sources) and all(
        strategies[place] == ROWWISE for place in group.linears
    )


def _option(group: Group, strategies: tuple[str, ...], kept: bool, owners: int, setting: Setting) -> Option:
    shared, load, memory, reduced = 0.0, 0.0, 0.0, 0.0
    messages, merged = [0] * len(COLLECTIVES), set[tuple[str, str]]()
    for place, (member, strategy) in enumerate(zip(group.members, strategies, strict=True)):
        for weight in member:
            own = REPLICATE if strategy == ROWWISE and not weight.uses else strategy
            once = _of_weight(weight, own, owners, setting)
            memory += once.memory
            reduced += once.wire[3] / (2 * max(setting.ranks - 1, 1))
            shared += _on_the_wire(once, setting)
            load += _work(once, setting)
            for use in weight.uses:
                from_columns, to_columns = kept and place in group.linears, kept and place in group.sources
                numbers, sent = _of_use(weight, use, own, owners, from_columns, to_columns, setting)
                shared += _on_the_wire(numbers, setting)
                load += _work(numbers, setting)
                if use.op != LINEAR and setting.batch_sharded:
                    merged |= {(name, f"{own} {number}") for number, name in sent}
                else:
                    for _, name in sent:
                        messages[COLLECTIVES.index(name)] += 1
    seconds, load = (shared, load) if owners else (shared + load, 0.0)
    return Option(strategies, kept, owners, seconds, load, memory, tuple(messages), frozenset(merged), reduced)


def _of_weight(weight: Weight, strategy: str, owners: int, setting: Setting) -> Numbers:
    sizes = Sizes(
        B=setting.batch_size,
        W=setting.ranks,
        V=weight.height,
        D=weight.width,
        k=owners or 1,
        e=weight.itemsize,
        s=setting.states,
    )
    return evaluate(weight_cost(strategy, batch_sharded=setting.batch_sharded, trained=weight.trained), sizes)


def _of_use(
    weight: Weight,
    use: Use,
    strategy: str,
    owners: int,
    from_columns: bool,
    to_columns: bool,
    setting: Setting,
) -> tuple[Numbers, list[tuple[int, str]]]:
    """The numbers of a site, and its collectives, each with its place among them."""
    cost = site_cost(
        use.op,
        ROWWISE if use.tied and strategy == COLWISE else strategy,
        batch_sharded=setting.batch_sharded,
        gradient=use.gradient,
        trained=weight.trained,
        from_columns=from_columns,
        to_columns=to_columns,
    )
    sizes = Sizes(
        B=setting.batch_size,
        W=setting.ranks,
        V=weight.width if use.tied else weight.height,
        D=weight.height if use.tied else weight.width,
        k=owners or 1,
        n=use.results,
        L=use.ids,
        o=use.offsets,
        e=weight.itemsize,
        i=weight.id_bytes,
        q=use.sample_bytes,
        m=use.sharers,
        c=setting.profile.line,
    )
    # Traffic of weights per sample stands in every lookup's cost, of 0 bytes where there are none.
    traffic = enumerate(cost.traffic)
    sent = [(number, item.collective) for number, item in traffic if use.sample_bytes or not item.bytes.has(Q)]
    return evaluate(cost, sizes), sent


def _on_the_wire(numbers: Numbers, setting: Setting) -> float:
    """Seconds, of the bytes that leave one rank."""
    return sum(
        setting.profile.link(name, setting.ranks).seconds(nbytes / setting.ranks, 0, setting.ranks)
        for name, nbytes in zip(COLLECTIVES, numbers.wire, strict=True)
        if nbytes
    )


def _work(numbers: Numbers, setting: Setting) -> float:
    """Seconds of the busiest rank: a kernel takes what its arithmetic or its memory takes, whichever is more."""
    profile = setting.profile
    streamed = max(numbers.flops / profile.flops, numbers.moved / profile.memory_bandwidth)
    return streamed + numbers.looked_up / profile.lookup_bandwidth


def step_seconds(chosen: Sequence[Option], setting: Setting) -> float:
    """A step of these options: what each takes, and the latencies of all collectives, merged as they are in the graph.

    What depends on where tables are put is left out.
    """
    messages = [0] * len(COLLECTIVES)
    for own, count in Counter(option.messages for option in chosen).items():
        messages = [so_far + count * number for so_far, number in zip(messages, own, strict=True)]
    merged = frozenset[tuple[str, str]]().union(*{option.merged for option in chosen})
    reduced = setting.reduced + sum(option.reduced for option in chosen)
    return sum(option.seconds for option in chosen) + latency(messages, merged, reduced, setting)


def latency(messages: Sequence[int], merged: Iterable[tuple[str, str]], reduced: float, setting: Setting) -> float:
    """Seconds that so many collectives take whatever is in them.

    Args:
        messages: that are shared with no other site, in the order of `COLLECTIVES`.
        merged: those that are shared, each once.
        reduced: bytes of gradients that are reduced in buckets.
        setting: ranks and hardware.
    """
    counts = dict(zip(COLLECTIVES, messages, strict=True))
    for collective, _ in merged:
        counts[collective] += 1
    counts["all_reduce"] += math.ceil(reduced / BUCKET_BYTES)
    ranks = setting.ranks
    return sum(setting.profile.link(name, ranks).seconds(0.0, count, ranks) for name, count in counts.items())
