"""Which sites take batches whose size differs between ranks: all, none, or those of the weights that globs name."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection

from autoshard.facts import Facts
from passes.errors import PlanError, describe

Ragged = bool | Collection[str]


def covers(ragged: Ragged, name: str) -> bool:
    """True if the parameter or module of this name is ragged: a glob matches it, or a module that it is in."""
    if isinstance(ragged, bool):
        return ragged
    parts = name.split(".")
    paths = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(path, glob) for path in paths for glob in ragged)


def ragged_weights(ragged: Ragged, facts: Facts) -> frozenset[str]:
    """The weights whose sites are ragged, tied ones by each of their names.

    Raises:
        PlanError: if this is neither a bool nor a collection of globs, or for a glob that matches no weight of a site.
    """
    weights = {facts.canonical[site.weight] for sites in facts.sites.values() for site in sites}
    names = {first: [name for name in facts.canonical if facts.canonical[name] == first] for first in weights}
    if not isinstance(ragged, bool):
        _check(ragged, [name for aliases in names.values() for name in aliases])
    chosen = [aliases for aliases in names.values() if any(covers(ragged, name) for name in aliases)]
    return frozenset(name for aliases in chosen for name in aliases)


def _check(ragged: object, names: list[str]) -> None:
    if isinstance(ragged, (str, bytes)) or not isinstance(ragged, Collection):
        raise PlanError(
            describe("ragged", f"got {ragged!r}", "True, False, or a collection of globs", 'Pass a list: ["users.*"].')
        )
    for glob in ragged:
        if not (isinstance(glob, str) and any(covers((glob,), name) for name in names)):
            raise PlanError(
                describe(
                    f"ragged entry {glob!r}",
                    "it matches no weight of an embedding, embedding_bag or linear",
                    f"a glob over module paths or parameter names such as {', '.join(sorted(names)[:3])}",
                    "Correct the name, or take the entry out.",
                )
            )
