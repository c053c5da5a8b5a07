"""A pool of gloo ranks that lives as long as the pytest run.

`Pool.run` calls a function on every rank of a mesh. Gloo aborts a process on mismatched sizes and
waits for ever for a missing peer, so every call has a time-out: the pool is then killed, the error
shows every rank's Python stack, and the next call starts a fresh pool.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from passes.ops.collectives import can_order_groups
from tests.rank import Answer, Request, import_on_rank, serve

T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parent.parent
START_TIMEOUT = 120.0
LOG_TAIL = 4000

# The compile workers of four ranks would fight for the cores that the ranks themselves need.
CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_CACHE_DIR": str(REPOSITORY / ".cache" / "inductor"),
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}

PRELOADED = ["tests.rank", "autoshard", "torch._dynamo", "torch._inductor.compile_fx"]


class RankError(RuntimeError):
    """Some rank raised. `exceptions` is in mesh order, None where a rank returned or got stuck."""

    def __init__(self, message: str, exceptions: list[BaseException | None]) -> None:
        super().__init__(message)
        self.exceptions = exceptions


class PoolError(RuntimeError):
    """The pool was killed.

    stacks: by the pool's rank, of those that lived and had given no answer.
    logs: by the pool's rank, the end of what it has written to stdout and stderr.
    """

    def __init__(self, message: str, stacks: dict[int, str], logs: dict[int, str]) -> None:
        super().__init__(message)
        self.stacks = stacks
        self.logs = logs


class PoolTimeout(PoolError):
    """Some rank gave no answer in time."""


class PoolDied(PoolError):
    """The process of some rank ended."""


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    connection: Connection
    folder: Path

    @property
    def log(self) -> str:
        path = self.folder / f"log{self.number}"
        return path.read_text(errors="replace")[-LOG_TAIL:] if path.exists() else ""

    def stack(self) -> str | None:
        """The Python stack as faulthandler writes it, even from within a C++ call that hangs."""
        path = self.folder / f"stack{self.number}"
        if not (path.exists() and self.process.is_alive() and self.process.pid):
            return None
        before = path.stat().st_size
        os.kill(self.process.pid, signal.SIGUSR1)
        text = ""
        for _ in range(40):
            time.sleep(0.05)
            previous, text = text, path.read_text()[before:]
            if text and text == previous:
                break
        # The thread that waits for the end of the parent would only be noise.
        threads = [part for part in re.split(r"\n\n", text) if "_end_with_parent" not in part]
        return "\n".join(threads)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for as long as processes are started, which take a copy."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Pool:
    """`world_size` processes, started by the first `run`.

    grace: how long, once a rank has raised or died, the others may take for their answers.
    """

    def __init__(self, world_size: int = 4, *, grace: float = 10.0) -> None:
        self.world_size = world_size
        self.grace = grace
        self._ranks: list[_Rank] = []
        self._store: dist.Store | None = None
        self._folder: Path | None = None
        self._requests = 0
        self._imported: set[str] = set()

    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        world_size: int | None = None,
        ranks: Sequence[int] | None = None,
        timeout: float = 60.0,
        fresh_dynamo: bool = False,
        **kwargs: Any,
    ) -> list[T]:
        """Calls `function(mesh, *args, **kwargs)` on every rank of a mesh.

        The results come in the order of the mesh.

        function: one that can be imported by name.
        world_size: the mesh has this many of the pool's ranks, from rank 0; all by default.
        ranks: the ranks of the mesh, in its order, which need not ascend.
        timeout: seconds. The start of a pool and the import of the function's module do not count.
        fresh_dynamo: forget everything compiled so far. Without it, Dynamo's limit of
            recompilations for a code object counts those of earlier calls too.
        """
        if ranks is None:
            ranks = range(self.world_size if world_size is None else world_size)
        mesh_ranks = tuple(ranks)
        if not mesh_ranks or not set(mesh_ranks) <= set(range(self.world_size)):
            raise ValueError(f"a pool of {self.world_size} ranks has no mesh {list(mesh_ranks)}")
        if len(set(mesh_ranks)) != len(mesh_ranks) or world_size not in (None, len(mesh_ranks)):
            raise ValueError(f"{list(mesh_ranks)} are not {world_size or 'that many'} ranks")
        if list(mesh_ranks) != sorted(mesh_ranks) and not can_order_groups():
            pytest.skip(f"torch {torch.__version__} makes no process group of another order than the ascending one")
        call = pickle.dumps((function, args, kwargs))
        what = f"{getattr(function, '__qualname__', function)} on {list(mesh_ranks)}"
        try:
            if not self._ranks:
                self._start()
            self._import(function.__module__)
            self._send(mesh_ranks, fresh_dynamo, call)
            answers = self._collect(what, timeout)
        except BaseException:
            self._kill()
            raise
        # Gloo pairs the collectives of a group by their number. Where a rank has left one out that the
        # others did not wait for, no later one could find its peers.
        in_step = len({answers[rank].collectives for rank in mesh_ranks if rank in answers}) == 1
        try:
            return self._results(answers, mesh_ranks)
        finally:
            if len(answers) < self.world_size or not in_step:
                self._kill()

    def expect_same_error(
        self,
        function: Callable[..., Any],
        *args: Any,
        error: type[BaseException] = Exception,
        match: str = "",
        **kwargs: Any,
    ) -> str:
        """Asserts that every rank raises `error` with the same text, which matches; returns it.

        The other arguments are those of `run`.
        """
        try:
            self.run(function, *args, **kwargs)
        except RankError as raised:
            failure = raised
        else:
            raise AssertionError(f"no rank raised {error.__name__}")
        exceptions = failure.exceptions
        if not all(isinstance(exception, error) for exception in exceptions):
            kinds = [type(exception).__name__ if exception else "nothing" for exception in exceptions]
            raise AssertionError(f"the ranks raised {kinds}, not {error.__name__}") from failure
        texts = [str(exception) for exception in exceptions]
        if len(set(texts)) > 1:
            listed = "\n".join(f"{place}: {text}" for place, text in enumerate(texts))
            raise AssertionError(f"the ranks raised different texts:\n{listed}") from failure
        if not re.search(match, texts[0]):
            raise AssertionError(f"{match!r} is not found in: {texts[0]}") from failure
        return texts[0]

    def close(self) -> None:
        """Lets the ranks end by themselves; a later `run` starts fresh ones."""
        for rank in self._ranks:
            rank.connection.close()
        for rank in self._ranks:
            rank.process.join(5)
        self._kill()

    def _start(self) -> None:
        # Ranks are forked from a process that has imported torch and has no threads: each would take seconds to do so.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        # The parent hosts the store, as it picks a free port itself and outlives every rank.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = store
        with _environment(CHILD_ENVIRONMENT):
            for number in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=serve,
                    args=(number, self.world_size, store.port, theirs, str(self._folder)),
                    name=f"rank {number}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._ranks.append(_Rank(number, process, ours, self._folder))
        self._collect("the start of the pool", START_TIMEOUT)

    def _import(self, module: str) -> None:
        """An import that fails does so again, and is reported, where a call needs it."""
        if module not in self._imported:
            call = pickle.dumps((import_on_rank, (module,), {}))
            self._send(tuple(range(self.world_size)), False, call)
            self._collect(f"the import of {module}", START_TIMEOUT)
            self._imported.add(module)

    def _send(self, mesh_ranks: tuple[int, ...], fresh_dynamo: bool, call: bytes) -> None:
        self._requests += 1
        request = Request(self._requests, mesh_ranks, tuple(sys.path), fresh_dynamo, call)
        pickled = pickle.dumps(request)
        for rank in self._ranks:
            try:
                rank.connection.send_bytes(pickled)
            except OSError:
                raise self._error(PoolDied, f"rank {rank.number} has died since the last call", {}) from None

    def _collect(self, what: str, timeout: float) -> dict[int, Answer]:
        """Every rank's answer, or those that came where a rank raised and others then got stuck."""
        answers: dict[int, Answer] = {}
        dead: list[int] = []
        deadline = time.monotonic() + timeout
        shortened = False
        while missing := [rank for rank in self._ranks if rank.number not in answers]:
            waiting = [rank for rank in missing if rank.number not in dead]
            left = deadline - time.monotonic()
            if not waiting or left <= 0:
                break
            wait([rank.connection for rank in waiting], left)
            for rank in waiting:
                if not rank.connection.poll():
                    continue
                try:
                    answers[rank.number] = pickle.loads(rank.connection.recv_bytes())
                except (EOFError, OSError):
                    # A process that ends closes its connections a little earlier.
                    rank.process.join(1)
                    dead.append(rank.number)
            failed = dead or any(answer.raised for answer in answers.values())
            if failed and not shortened:
                deadline = min(deadline, time.monotonic() + self.grace)
                shortened = True
        if dead:
            raise self._error(PoolDied, f"{what}: the processes of ranks {dead} ended", answers)
        if missing and not shortened:
            late = [rank.number for rank in missing]
            raise self._error(PoolTimeout, f"{what}: no answer from {late} in {timeout} s", answers)
        return answers

    def _results(self, answers: dict[int, Answer], mesh_ranks: tuple[int, ...]) -> list[Any]:
        if all(answer.raised is None for answer in answers.values()):
            return [answers[rank].value() for rank in mesh_ranks]
        texts = []
        for number in [*mesh_ranks, *sorted(set(range(self.world_size)) - set(mesh_ranks))]:
            if number not in answers:
                texts.append(f"rank {number} gave no answer in {self.grace} s, it was at:")
                texts.append(self._ranks[number].stack() or "its end")
            elif traceback := answers[number].traceback:
                texts.append(f"rank {number}:\n{traceback}")
            elif number in mesh_ranks:
                texts.append(f"rank {number} returned\n")
        found = [answers[rank].raised if rank in answers else None for rank in mesh_ranks]
        raise RankError("\n".join(texts), [pickle.loads(e) if e else None for e in found])

    def _error(self, kind: type[PoolError], why: str, answers: dict[int, Answer]) -> PoolError:
        """Must come before the processes are killed."""
        stacks: dict[int, str] = {}
        logs: dict[int, str] = {}
        texts = [why]
        # The cause comes first: what is cut from a long report is its middle.
        for rank in sorted(self._ranks, key=lambda rank: (rank.process.is_alive(), rank.number in answers)):
            number = rank.number
            if number in answers:
                texts.append(f"rank {number} {answers[number].traceback or 'returned'}")
            elif stack := rank.stack():
                stacks[number] = stack
                texts.append(f"rank {number} was at:\n{stack}")
            else:
                texts.append(f"rank {number} ended with exit code {rank.process.exitcode}")
            if log := rank.log:
                logs[number] = log
                texts.append(f"rank {number} had written:\n{log}")
        return kind("\n".join(texts), stacks, logs)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
            rank.connection.close()
        self._ranks = []
        self._imported = set()
        self._store = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
