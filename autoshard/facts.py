"""What is known of a model's parameters before anything is decided: who uses them, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import nn

from autoshard import hazards
from autoshard.capture import Capture
from passes.sites import OtherUse, Site, find_other_uses, find_sites


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a model's parameters before anything is decided.

    Attributes:
        parameters: every name -> parameter, tied ones under each of their names.
        canonical: every name -> the first name of that parameter.
        sites: canonical name -> the sites that use the parameter as a weight or bias.
        other_uses: canonical name -> its uses by nodes that are no sites.
        readers: canonical name -> the modules whose Python code reads the parameter, where no graph stands for that
            code.
        exposed: the modules of which another module's code reads a parameter, by path.
        kept: path -> why that module runs as it is.
    """

    parameters: Mapping[str, nn.Parameter]
    canonical: Mapping[str, str]
    sites: Mapping[str, tuple[Site, ...]]
    other_uses: Mapping[str, tuple[OtherUse, ...]]
    readers: Mapping[str, tuple[str, ...]]
    exposed: frozenset[str]
    kept: Mapping[str, str]


def gather_facts(model: nn.Module, capture: Capture) -> Facts:
    """Looks at the model and its graphs; changes nothing."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(id(p), name) for name, p in parameters.items()}
    sites: dict[str, list[Site]] = {}
    other_uses: dict[str, list[OtherUse]] = {}
    for region in capture.regions:
        for site in find_sites(region.graph, region.path):
            for name in (site.weight, site.bias):
                if name is not None:
                    sites.setdefault(canonical[name], []).append(site)
        for use in find_other_uses(region.graph, region.path):
            other_uses.setdefault(canonical[use.parameter], []).append(use)
    reads = [(reader, name) for reader, name in _reads(model, capture) if name in canonical]
    return Facts(
        parameters=parameters,
        canonical=canonical,
        sites={name: tuple(found) for name, found in sites.items()},
        other_uses={name: tuple(found) for name, found in other_uses.items()},
        readers=_readers(model, reads, canonical, sites),
        exposed=frozenset(owner for reader, name in reads if (owner := name.rpartition(".")[0]) != reader),
        kept=capture.kept,
    )


def _reads(model: nn.Module, capture: Capture) -> Iterator[tuple[str, str]]:
    """(path of a module, name of a parameter that its code reads), where no graph stands for that code."""
    traced = {id(region.module) for region in capture.regions}
    for path, module in model.named_modules():
        if id(module) not in traced:
            for names in hazards.parameter_reads(module):
                yield path, ".".join((path, *names) if path else names)


def _readers(
    model: nn.Module, reads: list[tuple[str, str]], canonical: Mapping[str, str], sites: Mapping[str, list[Site]]
) -> dict[str, tuple[str, ...]]:
    """The readers of each parameter; a module that alone uses its own parameter is none."""
    found: dict[str, list[str]] = {}
    for path, name in reads:
        if name.rpartition(".")[0] != path or canonical[name] in sites:
            reader = f"{path or 'the model'} ({type(model.get_submodule(path)).__name__})"
            found.setdefault(canonical[name], []).append(reader)
    return {name: tuple(dict.fromkeys(readers)) for name, readers in found.items()}
