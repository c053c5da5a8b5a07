"""What autoshard() changed, for people: readable code before and after, each edit with its shapes and bytes."""

from __future__ import annotations

import dataclasses
import difflib
import html
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import sympy
from tabulate import tabulate
from torch import fx

from passes.graph_pass import Edit
from passes.traffic import BACKWARD, FORWARD, Traffic, W, total

_COLOURS = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m", "#": "\033[2m"}
_HTML_CLASSES = {"+": "added", "-": "removed", "@": "hunk", "#": "note"}
_RESET = "\033[0m"


@dataclasses.dataclass(frozen=True)
class RegionDiff:
    """One traced module before and after.

    Attributes:
        path: of the module in the model.
        mode: the value of `training` that the graph is for, None if it is for both.
        is_layer: True for the graph of one layer by itself.
        before: readable code, a line per node.
        after: the same, rewritten.
        edits: what was done.
    """

    path: str
    mode: bool | None
    is_layer: bool
    before: tuple[str, ...]
    after: tuple[str, ...]
    edits: tuple[Edit, ...]


@dataclasses.dataclass(frozen=True)
class GraphDiff:
    """All that changed in a model. `print` shows a unified diff, in colour on a terminal.

    Attributes:
        regions: the traced modules, without those layers whose code stands in a larger graph.
        outside: what was done to parameters that no graph reads.
        world_size: ranks in the mesh.
    """

    regions: tuple[RegionDiff, ...]
    outside: tuple[Edit, ...]
    world_size: int

    @classmethod
    def of(cls, regions: Sequence[RegionDiff], world_size: int, outside: tuple[Edit, ...]) -> GraphDiff:
        """The diff of these regions; a single layer is left out where a larger graph holds it already."""
        inlined = {edit.module for region in regions if not region.is_layer for edit in region.edits}
        shown = [region for region in regions if not (region.is_layer and region.path in inlined)]
        return cls(tuple(shown), outside, world_size)

    @property
    def edits(self) -> tuple[Edit, ...]:
        """Every edit that a step of the model meets: those of the training graph where there are two."""
        graphs = [region for region in self.regions if region.mode is not False]
        return (*(edit for region in graphs for edit in region.edits), *self.outside)

    def bytes(self, direction: str | None = None) -> sympy.Expr:
        """Bytes on the wire per step, all ranks together, in the batch size B where it is not known.

        Args:
            direction: "forward", "backward", or None for both.
        """
        return self._evaluate(total(self._traffic(), direction))

    def summary(self) -> str:
        """A table: a row per edit, with its collectives and the bytes that they put on the wire per step."""
        rows = [
            [
                edit.op,
                edit.parameter,
                edit.what,
                edit.placement,
                _collectives(edit.traffic),
                *(self._amount(total(edit.traffic, direction)) for direction in (FORWARD, BACKWARD)),
            ]
            for edit in self.edits
        ]
        sums = ["", "total", "", "", "", self._amount_text(FORWARD), self._amount_text(BACKWARD)]
        table = tabulate(
            [*rows, sums],
            headers=["op", "parameter", "what", "placement", "collectives", "forward bytes", "backward bytes"],
            disable_numparse=True,
            colalign=("left",) * 5 + ("right",) * 2,
        )
        return f"{table}\nBytes on the wire per step, all {self.world_size} ranks together; B is the batch per rank."

    def __str__(self) -> str:
        lines = list(self.lines())
        if sys.stdout.isatty():
            lines = [_coloured(line) for line in lines]
        return "\n".join(lines)

    def lines(self) -> Iterable[str]:
        """The unified diff, line by line, without colour. A line that begins with "#" tells of the edit below it."""
        for region in self.regions:
            name = region.path or "model"
            mode = {None: "", True: " (training)", False: " (evaluation)"}[region.mode]
            yield from self._region_lines(region, f"{name}{mode}")

    def _region_lines(self, region: RegionDiff, name: str) -> Iterable[str]:
        notes: dict[str, list[Edit]] = {}
        for edit in region.edits:
            notes.setdefault(edit.node, []).append(edit)
        for line in difflib.unified_diff(
            region.before, region.after, f"{name}, before", f"{name}, sharded", lineterm="", n=1
        ):
            if line.startswith(("-", "+", " ")):
                for edit in notes.pop(_assigned(line), ()):
                    yield from self._note(edit)
            yield line.rstrip()

    def _note(self, edit: Edit) -> Iterable[str]:
        yield f"# {edit.module or edit.parameter}: {edit.what}; {edit.placement}; {edit.shapes}"
        for item in edit.traffic:
            evaluated = self._evaluate(item.bytes)
            known = "" if evaluated == item.bytes else f" = {evaluated}"
            yield f"#   {item.direction} {item.collective}: {item.bytes}{known} bytes"

    def to_html(self, path: str | Path) -> None:
        """Writes the diff and its summary as one HTML page without scripts.

        Args:
            path: of the file to write.
        """
        body = "\n".join(
            f'<span class="{_HTML_CLASSES.get(line[:1], "same")}">{html.escape(line)}</span>' for line in self.lines()
        )
        Path(path).write_text(_PAGE.format(summary=html.escape(self.summary()), body=body), encoding="utf-8")

    def _traffic(self) -> tuple[Traffic, ...]:
        return tuple(item for edit in self.edits for item in edit.traffic)

    def _evaluate(self, expression: sympy.Expr) -> sympy.Expr:
        return sympy.expand(expression.subs(W, self.world_size))

    def _amount(self, expression: sympy.Expr) -> str:
        return str(self._evaluate(expression)) if expression != 0 else "-"

    def _amount_text(self, direction: str) -> str:
        return self._amount(total(self._traffic(), direction))


_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>autoshard: graph diff</title>
<style>
body {{ font-family: monospace; }}
.added {{ background: #dfd; }} .removed {{ background: #fdd; }} .hunk {{ color: #088; }} .note {{ color: #777; }}
</style>
<pre>{summary}</pre>
<pre>{body}</pre>
"""


def readable_code(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """A graph's code for people: a line per node, functions by their own names, no bookkeeping.

    A layer in a single line is what a diff needs: `del` notes and the long names that fx gives to functions go.
    """
    ours = "|".join(_names(graph_module)) or "(?!)"
    lines = []
    for line in graph_module.code.splitlines():
        line = re.sub(r";\s+(\w+ = )+None$", "", line.rstrip())
        line = re.sub(rf"passes_ops_\w*?_(?=(?:{ours})\()", "", line)
        line = line.replace("torch.nn.functional.", "F.").replace("torch._C._nn.linear", "F.linear")
        if line.strip():
            lines.append(line)
    return tuple(lines)


def _names(graph_module: fx.GraphModule) -> list[str]:
    functions = {
        node.target.__name__
        for node in graph_module.graph.nodes
        if node.op == "call_function" and str(getattr(node.target, "__module__", "")).startswith("passes.ops")
    }
    return sorted(functions)


def _assigned(line: str) -> str:
    return line[1:].strip().partition(" ")[0]


def _coloured(line: str) -> str:
    colour = _COLOURS.get(line[:1])
    return line if colour is None else f"{colour}{line}{_RESET}"


def _collectives(items: Sequence[Traffic]) -> str:
    return ", ".join(f"{item.collective}{'' if item.direction == FORWARD else ' (bwd)'}" for item in items) or "-"
