"""The table of options names every argument, and tests that exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from autoshard import autoshard

REPOSITORY = Path(__file__).resolve().parent.parent
TABLES = (REPOSITORY / "autoshard" / "OPTIONS.md").read_text()


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, its head left out."""
    section = TABLES.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@pytest.mark.parametrize(
    ("heading", "function"),
    [
        ("F.embedding", F.embedding),
        ("F.embedding_bag", F.embedding_bag),
        ("F.linear", None),
        ("autoshard()", autoshard),
    ],
)
def test_every_argument_has_a_row(heading: str, function: Callable[..., Any] | None) -> None:
    named = [row[0].strip("`") for row in rows_of(heading) if row[0]]
    # F.linear is a built-in without a signature.
    arguments = ["input", "weight", "bias"] if function is None else list(inspect.signature(function).parameters)
    assert named == arguments


def test_every_row_has_three_cells_and_a_test() -> None:
    headings = re.findall(r"^## (.*)$", TABLES, re.MULTILINE)
    for heading in headings:
        for row in rows_of(heading):
            assert len(row) == 3, row
            assert row[1], row
            assert all(re.fullmatch(r"tests/[\w/]+\.py::test_\w+", test) for test in row[2].split(", ")), row


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", TABLES))
    assert len(named) > 30
    for file, test in named:
        tree = ast.parse((REPOSITORY / file).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"
