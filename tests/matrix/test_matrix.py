"""The matrix of cases against one process: forward, backward and two optimizer steps each.

A request to the pool takes many cases, as one by one the requests themselves would take most of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from tests.conftest import Cases
from tests.matrix.case import Case
from tests.matrix.cases import BY_MESH, BY_OPTION, COMPILED, INDUCTOR, REPLICATED
from tests.matrix.run import run_cases
from tests.pool import Pool

PER_REQUEST = 84
TIMEOUT = 240.0

# Meshes on which `make test` runs every n-th of the base cases, others on each.
NTH = {
    (0, 1, 2, 3): 2,
    **dict.fromkeys([(1, 0), (2, 0, 1), (2, 3), (3, 1), (1, 2, 3)], 3),
    **dict.fromkeys([(2, 3, 0, 1), (3, 0, 1, 2), (3, 2, 1, 0), (1, 3, 0, 2)], 6),
}


def by_mesh(chosen: Iterable[Case]) -> Iterator[tuple[Case, ...]]:
    """The cases in groups that fit a request: of one mesh, and not too many."""
    meshes: dict[tuple[int, ...], list[Case]] = {}
    for case in chosen:
        meshes.setdefault(case.ranks, []).append(case)
    for found in meshes.values():
        for start in range(0, len(found), PER_REQUEST):
            yield tuple(found[start : start + PER_REQUEST])


def base_cases() -> Iterator[tuple[str, Case]]:
    for number, (ranks, found) in enumerate(BY_MESH.items()):
        for place, case in enumerate(found):
            nth = NTH.get(ranks, 1)
            slow = place % nth != number % nth
            yield ("slow" if slow else "base"), case


def options() -> Iterator[tuple[str, Case]]:
    for place, case in enumerate(REPLICATED):
        yield ("slow" if case.world == 4 and place % 3 else "replicated inputs"), case
    for option, found in BY_OPTION.items():
        for place, case in enumerate(found):
            many = (option in ("ragged", "norms") and case.world > 2 and place % 2) or (option == "bags" and place % 2)
            large = option == "large ids" and case.dtype == "float16" and case.rows > 2**20
            yield ("slow" if many or large else option), case


def compiled_cases() -> Iterator[tuple[str, Case]]:
    yield from (("slow" if place % 6 else "compiled", case) for place, case in enumerate(COMPILED))


def inductor_cases() -> Iterator[tuple[str, Case]]:
    """On more than two ranks two cores compile for minutes."""
    quick = [case for case in INDUCTOR if case.world == 2][::8]
    yield from (("inductor" if case in quick else "slow", case) for case in INDUCTOR)


def requests(named: Iterable[tuple[str, Case]]) -> list[object]:
    """A parameter per request, named after what its cases have in common."""
    groups: dict[str, list[Case]] = {}
    for name, case in named:
        groups.setdefault(name, []).append(case)
    found = []
    for name, members in groups.items():
        for number, request in enumerate(by_mesh(members)):
            ranks = "".join(map(str, request[0].ranks))
            marks = [pytest.mark.slow] if name == "slow" else []
            found.append(pytest.param(request, id=f"{name} on {ranks} #{number}", marks=marks))
    return found


EAGER = requests([*base_cases(), *options()])


def check(pool: Pool, count: Cases, request: tuple[Case, ...], backend: str | None = None) -> None:
    """Runs one request and shows every case that failed, with the ranks that saw it fail."""
    results = pool.run(
        run_cases, list(request), backend, ranks=request[0].ranks, timeout=TIMEOUT, fresh_dynamo=backend is not None
    )
    count.add("matrix", backend, len(request))
    failures = [f"rank {place} of the mesh: {text}" for place, found in enumerate(results) for text in found]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("request_cases", EAGER)
def test_sharded_equals_one_process(pool: Pool, cases: Cases, request_cases: tuple[Case, ...]) -> None:
    check(pool, cases, request_cases)


@pytest.mark.parametrize("request_cases", requests(compiled_cases()))
def test_one_compiled_graph_equals_one_process(pool: Pool, cases: Cases, request_cases: tuple[Case, ...]) -> None:
    check(pool, cases, request_cases, "aot_eager")


@pytest.mark.parametrize("request_cases", requests(inductor_cases()))
def test_inductor_equals_one_process(pool: Pool, cases: Cases, request_cases: tuple[Case, ...]) -> None:
    check(pool, cases, request_cases, "inductor")


def test_matrix_is_as_large_as_promised() -> None:
    everything = [case for _, case in [*base_cases(), *options()]]
    quick = [case for name, case in [*base_cases(), *options()] if name != "slow"]
    assert len(set(everything)) == len(everything)
    assert len(quick) + sum(name != "slow" for name, _ in [*compiled_cases(), *inductor_cases()]) >= 1500
    assert len(COMPILED) >= 150
    assert sum(name != "slow" for name, _ in compiled_cases()) >= 25
    assert sum(name != "slow" for name, _ in inductor_cases()) >= 3
