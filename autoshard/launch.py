"""Fresh processes that form a process group, for `verify`: started, watched, and ended together."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from passes.errors import AutoshardError, describe


class RankFailure(AutoshardError):
    """A rank raised, died or hung; the message holds what every rank said."""


def launch(
    function: Callable[..., Any], args: tuple[Any, ...], world_size: int, backend: str, timeout: float
) -> list[Any]:
    """Runs `function(*args)` on each rank of a new process group.

    Args:
        function: importable from its module: processes are spawned, not forked.
        args: picklable.
        world_size: number of processes.
        backend: of `torch.distributed`.
        timeout: seconds until the processes are ended.

    Returns:
        The results, by rank.

    Raises:
        AutoshardError: the error of the first rank that raised one of ours.
        RankFailure: if a rank raised anything else, died, or was not done in time; with every rank's stack.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="autoshard-") as folder:
        ranks = []
        for rank in range(world_size):
            receive, send = context.Pipe(duplex=False)
            payload = _pickled((function, args))
            process = context.Process(
                target=_run, args=(rank, world_size, backend, folder, timeout, payload, send), daemon=True
            )
            process.start()
            send.close()
            ranks.append((process, receive))
        try:
            outcomes = _collect([receive for _, receive in ranks], timeout)
        finally:
            for process, _ in ranks:
                process.join(timeout=0 if process.is_alive() and "outcomes" not in locals() else 5)
                if process.is_alive():
                    process.kill()
                    process.join()
        return _results(outcomes, Path(folder))


def _pickled(work: tuple[Callable[..., Any], tuple[Any, ...]]) -> bytes:
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AutoshardError(
            describe(
                "verify()",
                f"an argument cannot be sent to a new process ({error})",
                "functions that are defined at the top of a module",
                "Move build_model and build_batch out of other functions; no lambdas.",
            )
        ) from error


def _run(
    rank: int, world_size: int, backend: str, folder: str, timeout: float, payload: bytes, send: Connection
) -> None:
    with open(Path(folder, f"stack-{rank}"), "w") as stack:
        faulthandler.dump_traceback_later(timeout, file=stack, exit=True)
        try:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
            if backend == "nccl":
                torch.cuda.set_device(rank)
            store = FileStore(str(Path(folder, "store")), world_size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
            function, args = pickle.loads(payload)
            send.send(("result", function(*args)))
            dist.barrier()
        except AutoshardError as error:
            send.send(("ours", error))
        except Exception:  # told to the parent
            send.send(("failure", traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
            if dist.is_initialized():
                dist.destroy_process_group()


def _collect(connections: list[Connection], timeout: float) -> list[tuple[str, Any]]:
    """What each rank sent; ("died", None) for one that sent nothing. Once one rank failed, the others get a moment."""
    outcomes: dict[Connection, tuple[str, Any]] = {}
    deadline = time.monotonic() + timeout + 5
    while len(outcomes) < len(connections) and time.monotonic() < deadline:
        waiting = [c for c in connections if c not in outcomes]
        for connection in wait(waiting, timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(connection, Connection)
            try:
                outcomes[connection] = connection.recv()
            except EOFError:
                outcomes[connection] = ("died", None)
            if outcomes[connection][0] != "result":
                deadline = min(deadline, time.monotonic() + 5)
    return [outcomes.get(connection, ("no answer", None)) for connection in connections]


def _results(outcomes: list[tuple[str, Any]], folder: Path) -> list[Any]:
    if all(kind == "result" for kind, _ in outcomes):
        return [value for _, value in outcomes]
    for kind, value in outcomes:
        if kind == "ours":
            raise value
    parts = []
    for rank, (kind, value) in enumerate(outcomes):
        stack = Path(folder, f"stack-{rank}")
        text = value if kind == "failure" else stack.read_text() if stack.exists() else ""
        parts.append(f"rank {rank}: {kind}\n{text}")
    raise RankFailure("a rank failed\n" + "\n".join(parts))
