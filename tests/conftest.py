from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo ranks for the whole run; the first call starts them."""
    pool = Pool()
    yield pool
    pool.close()


class Cases:
    """Counts the cases of a test that runs many of them; the summary adds up every test's."""

    def __init__(self, properties: list[tuple[str, object]]) -> None:
        # Reports carry a test's properties from a worker of pytest-xdist to the process that prints the summary.
        self._properties = properties

    def add(self, suite: str, backend: str | None, number: int) -> None:
        self._properties.append((suite, {backend or "eager": number}))


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Cases:
    return Cases(request.node.user_properties)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    suites: dict[str, Counter[str]] = {"matrix": Counter(), "fuzz": Counter()}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for suite, numbers in report.user_properties:
                suites[suite].update(numbers)
    for suite, numbers in suites.items():
        if numbers:
            kinds = ", ".join(f"{number} {kind}" for kind, number in numbers.items())
            seed = f", seed {terminalreporter.config.getoption('--fuzz-seed')}" if suite == "fuzz" else ""
            terminalreporter.write_line(f"{suite}: {numbers.total()} cases ({kinds}){seed}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-cases", type=int, help="how many random cases to run; a few by default")
    parser.addoption("--fuzz-seed", type=int, default=0, help="where the random cases begin")
