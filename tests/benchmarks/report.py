"""The times of a run as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from tests.benchmarks.workloads import YARDSTICKS

# contender -> median, lower, upper; milliseconds
Times = Mapping[str, Mapping[str, float]]


def table(times: Times, yardsticks: Sequence[str] = YARDSTICKS, digits: int = 1) -> str:
    """A row per contender; behind its times, to so many decimal places, their ratios to each yardstick there is."""
    yardsticks = [name for name in yardsticks if name in times]
    rows = [
        [
            name,
            f"{timing['median']:.{digits}f}",
            f"{timing['lower']:.{digits}f} .. {timing['upper']:.{digits}f}",
            *(f"{timing['median'] / times[other]['median']:.2f}" for other in yardsticks),
        ]
        for name, timing in times.items()
    ]
    headers = ["", "median", "quartiles", *(f"/ {name}" for name in yardsticks)]
    return tabulate(rows, headers=headers, disable_numparse=True)


def plot(found: Mapping[str, Mapping[str, Times]], title: str, path: Path) -> None:
    """workload -> "forward" or "step" -> times; a panel for each, bars for medians, whiskers for quartiles."""
    from matplotlib.figure import Figure

    rows = max(len(times) for kinds in found.values() for times in kinds.values())
    figure = Figure(figsize=(13, 1 + len(found) * (0.8 + 0.25 * rows)), layout="constrained")
    panels = figure.subplots(len(found), 2, squeeze=False)
    for (name, kinds), axes in zip(found.items(), panels, strict=True):
        for axis, (kind, times) in zip(axes, kinds.items(), strict=True):
            names, timings = list(times)[::-1], list(times.values())[::-1]
            medians = [timing["median"] for timing in timings]
            spread = [
                [timing["median"] - timing["lower"] for timing in timings],
                [timing["upper"] - timing["median"] for timing in timings],
            ]
            colours = ["tab:orange" if "autoshard" in name else "tab:gray" for name in names]
            axis.barh(names, medians, xerr=spread, color=colours)
            axis.set(title=f"{name}, {kind}", xlabel="ms", xlim=(0, None))
            axis.tick_params(labelsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
