"""The graph diff: its text, its table and its page tell of every edit, and of nothing else."""

from __future__ import annotations

import functools
import io
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from autoshard import GraphDiff, autoshard, graph_diff, sharding_plan
from passes.traffic import BACKWARD, FORWARD, B, total
from tests.compare import plan_of
from tests.models import MODELS
from tests.pool import Pool

DIFFS = [
    ("dlrm", True, "colwise", False),
    ("mlp", False, "colwise", False),
    ("mlp", True, "colwise", True),
    ("two_tower", True, "colwise", False),
    ("two_tower", True, "replicate", False),
    ("transformer", True, "colwise", False),
    ("transformer", False, "colwise", False),
    ("dropout", True, "colwise", False),
    ("batch_norm", True, "colwise", False),
    ("attention", False, "colwise", False),
    ("tied_head", True, "colwise", False),
    ("frozen", True, "colwise", False),
    ("parameters", False, "colwise", False),
    ("offset_bag", True, "colwise", False),
]


def diff_on_rank(mesh: DeviceMesh, name: str, examples: bool, plan: str, replicated: bool) -> GraphDiff:
    case = MODELS[name]
    sharded = autoshard(
        case.make(),
        mesh,
        plan_of(plan),
        example_inputs=case.one_batch() if examples else None,
        input_placement=Replicate() if replicated else Shard(0),
    )
    return graph_diff(sharded)


@functools.cache
def _diff(pool: Pool, *setting: Any) -> GraphDiff:
    result: GraphDiff = pool.run(diff_on_rank, *setting, world_size=2, timeout=120)[0]
    return result


# Of a module, so that all tests of one diff follow one another and stay on one worker.
@pytest.fixture(params=DIFFS, ids=lambda setting: "-".join(map(str, setting)), scope="module")
def diff(request: pytest.FixtureRequest, pool: Pool) -> GraphDiff:
    return _diff(pool, *request.param)


def code(lines: list[str], signs: str) -> list[str]:
    return [line[1:] for line in lines if line[:1] in signs and not line.startswith(("---", "+++"))]


def is_subsequence(part: list[str], whole: tuple[str, ...]) -> bool:
    rest = iter(whole)
    return all(any(line == other.rstrip() for other in rest) for line in part)


# ---------------------------------------------------------------- the text


def test_the_text_has_lines_of_the_code_before_and_after_only(diff: GraphDiff) -> None:
    for region in diff.regions:
        lines = list(GraphDiff((region,), (), diff.world_size).lines())
        assert {line[:1] for line in lines} <= set("+- @#")
        assert is_subsequence(code(lines, "- "), region.before)
        assert is_subsequence(code(lines, "+ "), region.after)
        changed = set(map(str.rstrip, region.before)) ^ set(map(str.rstrip, region.after))
        assert changed == set(code(lines, "+")) ^ set(code(lines, "-"))


def test_every_edit_of_a_graph_has_a_note_with_its_traffic(diff: GraphDiff) -> None:
    for region in diff.regions:
        lines = list(GraphDiff((region,), (), diff.world_size).lines())
        notes = [line for line in lines if line.startswith("# ") and not line.startswith("#  ")]
        expected = [f"# {edit.module or edit.parameter}: {edit.what}; " for edit in region.edits]
        assert len(notes) == len(expected)
        for start in expected:
            assert sum(note.startswith(start) for note in notes) == expected.count(start)
        assert sum(line.startswith("#   ") for line in lines) == sum(len(edit.traffic) for edit in region.edits)


def test_a_note_stands_above_the_line_that_it_is_about(pool: Pool) -> None:
    lines = list(_diff(pool, "two_tower", True, "colwise", False).lines())
    note = next(n for n, line in enumerate(lines) if line.startswith("# users: "))
    below = next(line for line in lines[note:] if not line.startswith("#"))
    assert re.match(r"-\s+embedding = torch\.ops\.aten\.embedding\.default\(users_weight, user\)", below)


def test_the_code_is_readable(diff: GraphDiff) -> None:
    for line in diff.lines():
        assert "passes_ops" not in line
        assert "= None" not in line.partition("(")[0]
        assert not re.search(r";\s+\w+ = None", line)


def test_the_sandwich_stands_in_the_code_by_the_names_of_its_functions(pool: Pool) -> None:
    added = "\n".join(code(list(_diff(pool, "two_tower", True, "colwise", False).lines()), "+"))
    for function in ("all_gather_batch(", "local_columns(", "embedding(", "rearrange_columns("):
        assert function in added
    removed = "\n".join(code(list(_diff(pool, "two_tower", True, "colwise", False).lines()), "-"))
    assert "rearrange_columns" not in removed


def test_notes_of_a_capture_with_examples_tell_shapes_in_the_batch_size(pool: Pool) -> None:
    text = str(_diff(pool, "dlrm", True, "colwise", False))
    assert "# bottom.0: sharded by column over 2 ranks; Shard(0) -> Replicate -> Shard(-1) -> Shard(0); " in text
    assert "weight (64, 13) -> (32, 13) per rank, (B, 13) -> (B, 64)" in text
    assert not re.search(r"\bs\d+\b", text)


def test_a_note_evaluates_bytes_for_the_ranks_there_are(pool: Pool) -> None:
    """13 counts of 8 bytes from each of 2 ranks to the other."""
    (line,) = [
        line
        for line in _diff(pool, "dlrm", True, "colwise", False).lines()
        if line.startswith("#   forward all_gather: 104*B")
    ]
    assert line == "#   forward all_gather: 104*B*W**2 - 104*B*W = 208*B bytes"


def test_a_layer_by_itself_is_shown_only_where_no_graph_holds_it(pool: Pool) -> None:
    assert [region.path for region in _diff(pool, "mlp", False, "colwise", False).regions] == [""]
    regions = _diff(pool, "attention", False, "colwise", False).regions
    assert [region.path for region in regions if not region.is_layer] == [""]
    assert {region.path for region in regions} <= {"", "attention.out_proj"}


def test_each_mode_has_a_diff_of_its_own_and_a_step_is_counted_once(pool: Pool) -> None:
    diff = _diff(pool, "dropout", True, "colwise", False)
    headers = [line for line in diff.lines() if line.startswith("---")]
    assert headers == ["--- model (training), before", "--- model (evaluation), before"]
    training = next(region for region in diff.regions if region.mode is True)
    assert diff.edits == (*training.edits, *diff.outside)


def test_a_plan_that_replicates_everything_shards_nothing(pool: Pool) -> None:
    diff = _diff(pool, "two_tower", True, "replicate", False)
    assert {edit.op for edit in diff.edits} == {"parameter", "collective"}
    assert "sharded by column" not in str(diff)
    assert diff.bytes(FORWARD) == 0
    parameters = sum(p.numel() for p in MODELS["two_tower"].make().parameters())
    assert diff.bytes(BACKWARD) == 2 * parameters * 8


def test_what_needs_no_gradient_moves_nothing_backward(pool: Pool) -> None:
    frozen = [edit for edit in _diff(pool, "frozen", True, "colwise", False).edits if edit.parameter == "fixed.weight"]
    assert frozen
    assert total([item for edit in frozen for item in edit.traffic], BACKWARD) == 0


# ---------------------------------------------------------------- numbers


def test_totals_are_the_sums_of_the_edits(diff: GraphDiff) -> None:
    for direction in (FORWARD, BACKWARD):
        parts = sum(
            (GraphDiff((), (edit,), diff.world_size).bytes(direction) for edit in diff.edits), start=sympy.Integer(0)
        )
        assert sympy.expand(parts - diff.bytes(direction)) == 0
    assert sympy.expand(diff.bytes(FORWARD) + diff.bytes(BACKWARD) - diff.bytes()) == 0


@pytest.mark.parametrize("name", ["dlrm", "two_tower", "transformer"])
def test_bytes_depend_on_the_batch_size_alone_where_shapes_are_known(pool: Pool, name: str) -> None:
    diff = _diff(pool, name, True, "colwise", False)
    assert diff.bytes(FORWARD).free_symbols == {B}
    assert diff.bytes(BACKWARD).free_symbols == {B}
    assert diff.bytes(FORWARD).subs(B, 7).is_number


def test_one_rank_moves_no_bytes(pool: Pool) -> None:
    for examples in (True, False):
        diff = pool.run(diff_on_rank, "two_tower", examples, "colwise", False, world_size=1, timeout=120)[0]
        assert diff.bytes() == 0
        assert diff.edits


def test_every_parameter_is_told_of(diff: GraphDiff, request: pytest.FixtureRequest) -> None:
    """In a graph, or outside of all graphs, by one of its names; a bias goes with its weight."""
    name = request.node.callspec.params["diff"][0]
    model = MODELS[name].make()
    told = {id(model.get_parameter(edit.parameter)) for edit in diff.edits if edit.parameter != "-"}
    for parameter, value in model.named_parameters():
        owner, _, own = parameter.rpartition(".")
        assert id(value) in told or (own == "bias" and id(model.get_parameter(f"{owner}.weight")) in told), parameter


# ---------------------------------------------------------------- the table


def test_the_summary_has_a_row_for_every_edit_and_the_totals(diff: GraphDiff) -> None:
    header, rule, *rows, last, legend = diff.summary().splitlines()
    assert [part.strip() for part in re.split(r"\s{2,}", header)] == [
        "op",
        "parameter",
        "what",
        "placement",
        "collectives",
        "forward bytes",
        "backward bytes",
    ]
    assert set(rule) <= set("- ")
    assert len(rows) == len(diff.edits)
    for row, edit in zip(rows, diff.edits, strict=True):
        cells = re.split(r"\s{2,}", row.strip())
        assert cells[:3] == [edit.op, edit.parameter, edit.what]
        for cell, direction in zip(cells[-2:], (FORWARD, BACKWARD), strict=True):
            own = GraphDiff((), (edit,), diff.world_size).bytes(direction)
            assert own == (0 if cell == "-" else sympy.sympify(cell, locals=_symbols(own)))
    assert re.split(r"\s{2,}", last.strip())[0] == "total"
    assert legend == "Bytes on the wire per step, all 2 ranks together; B is the batch per rank."
    for cell, direction in zip(re.split(r"\s{2,}", last.strip())[-2:], (FORWARD, BACKWARD), strict=True):
        own = diff.bytes(direction)
        assert own == (0 if cell == "-" else sympy.sympify(cell, locals=_symbols(own)))


def _symbols(expression: sympy.Expr) -> dict[str, sympy.Symbol]:
    return {symbol.name: symbol for symbol in expression.free_symbols}


# ---------------------------------------------------------------- the page, the terminal


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.spans: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)
        if tag == "span":
            self.spans.append((str(dict(attrs)["class"]), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "span":
            kind, text = self.spans[-1]
            self.spans[-1] = kind, text + data


def test_the_page_is_well_formed_and_has_the_diff_line_by_line(diff: GraphDiff, tmp_path: Path) -> None:
    path = tmp_path / "diff.html"
    diff.to_html(path)
    text = path.read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert page.tags == {"meta", "title", "style", "pre", "span"}
    assert [line for _, line in page.spans] == list(diff.lines())
    kinds = {"+": "added", "-": "removed", "@": "hunk", "#": "note", " ": "same"}
    assert all(kind == kinds[line[:1]] for kind, line in page.spans if line)
    assert "http" not in text


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_a_terminal_only(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    diff = _diff(pool, "mlp", True, "colwise", True)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    plain = str(diff)
    assert plain == "\n".join(diff.lines())
    assert "\033" not in plain
    monkeypatch.setattr(sys, "stdout", _Terminal())
    coloured = str(diff)
    assert re.sub(r"\033\[\d*m", "", coloured) == plain
    for line in coloured.splitlines():
        assert (line.startswith("\033[") and line.endswith("\033[0m")) == (line[:1] != " " and line != "")


# ---------------------------------------------------------------- where it comes from


def same_through_compile(mesh: DeviceMesh) -> tuple[bool, bool]:
    sharded = autoshard(MODELS["mlp"].make(), mesh, "paired")
    compiled = torch.compile(sharded, backend="eager")
    return graph_diff(compiled) is graph_diff(sharded), sharding_plan(compiled) is sharding_plan(sharded)


def test_a_compiled_model_has_the_diff_and_plan_of_the_model_inside(pool: Pool) -> None:
    assert pool.run(same_through_compile, world_size=2, timeout=120) == [(True, True)] * 2
