"""What the fuzz suite once found, by name."""

from __future__ import annotations

import pytest

from tests.matrix.case import BAG, EMBEDDING, LINEAR, Case
from tests.matrix.run import run_cases
from tests.pool import Pool

FOUND = {
    "a whole table with max_norm and replicated inputs": Case(
        EMBEDDING, (), 1, 1, (0, 2), replicated=True, plan="replicate", max_norm=3.5, norm_type=0.0, zeros=True
    ),
    "the same with weights per sample": Case(
        BAG, (9,), 17, 12, bags=4, weighted=True, replicated=True, plan="replicate", max_norm=3.5
    ),
    "max_norm of ids behind the last offset": Case(
        BAG, (8,), 18, 7, (0, 2), mode="max", bags=4, include_last_offset=True, tail=5, max_norm=2.0, norm_type=3.0
    ),
    "sparse gradients of ids behind the last offset": Case(
        BAG, (8,), 8, 1, (0, 2, 3, 1), optimizer="sparse_adam", bags=1, include_last_offset=True, tail=7, sparse=True
    ),
    "one column of a bag on each rank": Case(BAG, (4, 3), 9, 2, (0, 2)),
    "one column on each rank": Case(LINEAR, (3, 1), 1, 3, (0, 1, 3), bias=False),
}


COMPILED = {
    "sizes of one rank are no constant": Case(LINEAR, (1, 17), 17, 6, (0,), bias=False, sizes=(6,)),
    "sizes of two ranks are no constants": Case(LINEAR, (1, 17), 17, 6, (1, 0), bias=False, sizes=(6, 3)),
    "one feature and rows of unknown number": Case(LINEAR, (1, 1), 1, 2, (0, 1), sizes=(0, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED.values(), ids=COMPILED.keys())
def test_what_was_found_compiled(pool: Pool, case: Case) -> None:
    found = pool.run(run_cases, [case], "aot_eager", ranks=case.ranks, fresh_dynamo=True, timeout=60)
    assert found == [[]] * case.world


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND.keys())
def test_what_was_found(pool: Pool, case: Case) -> None:
    for found in (case, case.on(1, 3, 0)):
        assert pool.run(run_cases, [found], ranks=found.ranks) == [[]] * found.world
