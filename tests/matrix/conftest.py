from __future__ import annotations

from collections.abc import Iterator

import pytest

# By backend ("eager" for none), how many cases have run.
COUNT: dict[str, int] = {}


@pytest.fixture(scope="session")
def matrix_count() -> Iterator[dict[str, int]]:
    COUNT.clear()
    yield COUNT


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNT:
        kinds = ", ".join(f"{number} {kind}" for kind, number in COUNT.items())
        terminalreporter.write_line(f"matrix: {sum(COUNT.values())} cases ({kinds})")
