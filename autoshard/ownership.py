"""Tables whose columns are on some of the ranks: who may be put there, who owns what, and what that saves."""

from __future__ import annotations

from collections.abc import Sequence

from passes.errors import PlanError, describe
from passes.layout import chunk_sizes, id_dtype
from passes.plan import Colwise
from passes.sites import LINEAR, Site


def require_possible(
    name: str,
    want: Colwise,
    source: str,
    sites: Sequence[Site],
    obstacle: str | None,
    world_size: int,
    batch_sharded: bool,
) -> None:
    """A parameter may have its columns on these ranks.

    Args:
        name: of the parameter.
        want: what the plan asks for.
        source: where it does.
        sites: all uses of the parameter.
        obstacle: why it cannot be sharded at all, or None.
        world_size: ranks in the mesh.
        batch_sharded: True if each rank has its own batch.

    Raises:
        PlanError: otherwise.
    """
    ranks = want.ranks
    options = {option for site in sites for option, _ in site.options}
    remedy = 'Ask for "colwise" or "replicate", or take the entry out.'
    if not ranks or list(ranks) != sorted(set(ranks)) or ranks[0] < 0 or ranks[-1] >= world_size:
        fact, expected = f"ranks {ranks}", f"ascending places in a mesh of {world_size} ranks"
        remedy = "Correct the ranks."
    elif obstacle is not None:
        fact, expected = f"the parameter cannot be sharded by column: {obstacle}", "the table of a lookup"
    elif any(site.op == LINEAR for site in sites):
        fact, expected = "the parameter is used by a linear", "the table of an embedding or embedding_bag"
    elif not batch_sharded:
        fact, expected = "the inputs are replicated: no ids have to travel", "input_placement=Shard(0)"
    elif "max_norm" in options and len(ranks) < world_size:
        fact, expected = "the lookup has a max_norm", "none: its norms are summed over all ranks"
    else:
        return
    raise PlanError(describe(f"{source}, {name}", fact, expected, remedy))


def owners(want: object, columns: int, world_size: int) -> tuple[int, ...] | None:
    """The ranks that a table is put on; None where it is on all of them, each of which holds a part.

    A rank that a plan names and that gets no column is no owner: D columns over k ranks by the rule of `torch.chunk`.
    """
    if not isinstance(want, Colwise):
        return None
    sizes = chunk_sizes(columns, len(want.ranks))
    chosen = tuple(rank for rank, size in zip(want.ranks, sizes, strict=True) if size)
    return chosen if len(chosen) < world_size else None


def reason(want: object, ranks: tuple[int, ...] | None, world_size: int, rows: int) -> str:
    """What is cheaper, in bytes: to send ids to the ranks that own columns, or to gather them on all."""
    if not isinstance(want, Colwise):
        return ""
    if ranks is None:
        return "; every rank owns a part, so that ids are gathered"
    sent, gathered = (count * (world_size - 1) * id_dtype(rows).itemsize for count in (len(ranks), world_size))
    return (
        f" of {', '.join(map(str, ranks))}; ids are sent there: {sent} bytes for an id of each rank, "
        f"to gather them would take {gathered}"
    )
