"""Do the ranks agree? Every rank does its part, then all compare; where one failed or differs, all raise the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from passes.errors import AgreementError, AutoshardError, describe

T = TypeVar("T")


def agree(mesh: DeviceMesh, work: Callable[[], T], text: Callable[[T], str]) -> T:
    """Runs `work` on every rank and compares the text of its results. Collective over the mesh.

    Args:
        mesh: the ranks that have to agree.
        work: this rank's part; may raise.
        text: of a result, equal on all ranks if they agree.

    Returns:
        This rank's result.

    Raises:
        AutoshardError: on every rank, the one of the first rank whose `work` raised.
        AgreementError: on every rank, naming the first line in which two ranks' texts differ.
    """
    failure: Exception | None = None
    own = ""
    try:
        result = work()
        own = text(result)
    except Exception as error:  # told to all ranks, then raised
        failure = error
    digest = hashlib.sha256(own.encode()).hexdigest()
    statuses: list[tuple[str, Exception | None]] = _exchange(mesh, (digest, _portable(failure)))
    failures = [raised for _, raised in statuses]
    if any(failures):
        rank, first = next((r, e) for r, e in enumerate(failures) if e is not None)
        if failure is not None and all(str(other) == str(first) for other in failures):
            raise failure
        raise _one_rank_failed(rank, first) from failure
    if len({digest for digest, _ in statuses}) > 1:
        raise AgreementError(_first_difference(_exchange(mesh, own)))
    return result


def _exchange(mesh: DeviceMesh, mine: object) -> list:  # type: ignore[type-arg]  # of whatever `mine` is
    gathered: list[object] = [None] * mesh.size()
    dist.all_gather_object(gathered, mine, group=mesh.get_group())
    return gathered


def _portable(error: Exception | None) -> Exception | None:
    """An error that travels: ours as they are, others by their text."""
    if error is None or isinstance(error, AutoshardError):
        return error
    return AutoshardError(f"{type(error).__name__}: {error}")


def _one_rank_failed(rank: int, error: Exception) -> AutoshardError:
    kind = type(error) if isinstance(error, AutoshardError) else AutoshardError
    return kind(f"rank {rank} of the mesh: {error}")


def _first_difference(texts: list[str]) -> str:
    lines = [text.splitlines() for text in texts]
    other = next(rank for rank, text in enumerate(texts) if text != texts[0])
    pairs = zip(lines[0] + ["(nothing)"], lines[other] + ["(nothing)"], strict=False)
    first, second = next((a, b) for a, b in pairs if a != b)
    return describe(
        "autoshard()",
        f"the ranks differ: rank 0 of the mesh has `{first.strip()}`, rank {other} has `{second.strip()}`",
        "the same model and the same plan on every rank",
        "Build the model and the plan from the same arguments everywhere.",
    )
