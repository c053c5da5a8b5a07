"""Linears whose weight is sharded along its input axis: which may be, and for which `plan="paired"` asks for it.

A linear that follows another one, or a lookup, through column-wise work takes the columns as they are: no rank needs
the other columns, and each pair ends in one reduce_scatter (replicated inputs: one all_reduce) of its output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from autoshard.capture import Capture
from passes.column_flow import Feed, find_feeds
from passes.errors import PlanError, describe
from passes.sites import Site, find_sites


def require_linear(name: str, source: str, wrong: Sequence[Site], kind: str) -> None:
    """A parameter may be sharded rowwise.

    Args:
        name: of the parameter.
        source: where the plan asks for it.
        wrong: its uses that are not as the weight of a linear.
        kind: what it is in these uses.

    Raises:
        PlanError: if there are any.
    """
    if wrong:
        raise PlanError(
            describe(
                f"{source}, {name}",
                f"the parameter is {kind} of {wrong[0].op} {wrong[0].module or wrong[0].weight}",
                '"rowwise" for the weight of a linear only: it shards the input axis',
                'Ask for "colwise" or "replicate", or take the entry out.',
            )
        )


def pair_rowwise(
    capture: Capture,
    canonical: Mapping[str, str],
    parameters: Mapping[str, nn.Parameter],
    free: Collection[str],
    world_size: int,
) -> dict[str, str]:
    """The linears' weights that had better be rowwise where all else is colwise, each with the reason.

    In a chain every other linear is: columns go into it, rows come out of it.

    Args:
        capture: normalized graphs.
        canonical: every name of a parameter -> the first.
        parameters: by name, for shapes.
        free: first names of the parameters that can be sharded.
        world_size: ranks in the mesh.
    """
    regions = [region for region in capture.regions if not region.is_layer]
    feeds = [feed for region in regions for feed in find_feeds(region.graph, parameters, region.path)]
    sites = [site for region in regions for site in find_sites(region.graph, region.path)]
    uses = Counter(canonical[site.weight] for site in sites)
    fed = Counter(canonical[name] for feed in feeds for name in feed.linears)
    refused = {name for name in fed if name not in free or uses[name] != fed[name]}
    pairs = {(canonical[site.weight], canonical[site.bias]) for site in sites if site.bias is not None}
    by_column = set(free) - {weight for weight, bias in pairs if bias not in free}  # the others follow their bias
    uses_of_bias = Counter(bias for _, bias in pairs)
    refused |= {weight for weight, bias in pairs if uses_of_bias[bias] > 1}  # whose bias others want sharded
    reasons: dict[str, str] = {}
    colwise: set[str] = set()
    for feed in feeds:
        sources = {canonical[name]: name for name in feed.sources}
        linears = {canonical[name] for name in feed.linears}
        if not sources.keys() <= by_column - linears - reasons.keys() or linears & (colwise | refused):
            refused |= linears
        elif _moves_fewer_bytes(feed, sum(parameters[name].size(0) for name in feed.linears), world_size):
            colwise |= sources.keys()
            reasons |= dict.fromkeys(linears, f"takes the columns of {', '.join(sources)} as they are")
        else:
            refused |= linears
    return {name: reason for name, reason in reasons.items() if name not in refused}


def _moves_fewer_bytes(feed: Feed, out: int, world_size: int) -> bool:
    """True if a reduce_scatter of `out` columns moves no more than what puts rows together and takes them apart.

    For a row of each rank, W ranks, S sources of D columns, and times W - 1: to rearrange the sources' columns takes
    S * D, to gather the rows W * D, to rearrange the linears' columns `out`; to scatter their sums takes W * out.
    """
    return (world_size - 1) * out <= (world_size + len(feed.sources)) * feed.width
