from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo ranks for the whole run; the first call starts them."""
    pool = Pool()
    yield pool
    pool.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-cases", type=int, help="how many random cases to run; a few by default")
    parser.addoption("--fuzz-seed", type=int, default=0, help="where the random cases begin")
