"""Random cases against `torch.nn.functional` in one process.

`make fuzz N=10000 SEED=1` draws that many; `make test` a few, always the same. A mismatch is shrunk, and printed as a
line that runs it again.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.conftest import Cases
from tests.fuzz.draw import Request, requests
from tests.matrix.case import Case
from tests.matrix.run import run_cases
from tests.pool import Pool

TIMEOUT = 120.0

# A compiled case takes as long as a hundred eager ones.
BACKENDS = (*(None,) * 20, *("aot_eager",) * 6, "inductor")
QUICK_BACKENDS = (*(None,) * 20, "aot_eager")


def command(case: Case, backend: str | None) -> str:
    return f'python -m tests.fuzz "{case}"' + ("" if backend is None else f" {backend}")


class Fuzz:
    """Draws requests until `limit` cases have run."""

    def __init__(self, pool: Pool, cases: Cases, limit: int) -> None:
        self.pool, self.cases, self.limit = pool, cases, limit
        self.count = 0

    def run(self, backends: tuple[str | None, ...], first_seed: int) -> None:
        """Each hundred requests have a seed of their own, the first one `first_seed`."""
        number = first_seed
        while self.count < self.limit:
            rules = settings(
                max_examples=100,
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            )
            seed(number)(rules(given(requests(backends))(self._check)))()
            number += 1

    def _check(self, request: Request) -> None:
        if self.count >= self.limit:
            return
        self.count += len(request.cases)
        self.cases.add("fuzz", request.backend, len(request.cases))
        results = self.pool.run(
            run_cases,
            list(request.cases),
            request.backend,
            ranks=request.cases[0].ranks,
            timeout=TIMEOUT,
            fresh_dynamo=request.backend is not None,
        )
        failures = list(dict.fromkeys(text for found in results for text in found))
        failed = [case for case in request.cases if any(text.startswith(str(case)) for text in failures)]
        commands = [command(case, request.backend) for case in failed]
        assert not failures, "\n".join([*failures, "To run it again:", *commands])


def test_random_cases_equal_one_process(pool: Pool, cases: Cases, request: pytest.FixtureRequest) -> None:
    limit: int | None = request.config.getoption("--fuzz-cases")
    first_seed: int = request.config.getoption("--fuzz-seed")
    fuzz = Fuzz(pool, cases, 100 if limit is None else limit)
    fuzz.run(QUICK_BACKENDS if limit is None else BACKENDS, first_seed)
