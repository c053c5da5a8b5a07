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
