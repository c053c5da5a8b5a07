"""What runs in a process of the pool."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from passes.ops.collectives import ordered_group

# Longer than any call, so that it is the pool that notices a missing peer and shows the stacks.
GLOO_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class Request:
    number: int
    mesh_ranks: tuple[int, ...]
    import_path: tuple[str, ...]
    fresh_dynamo: bool
    # (function, args, kwargs), still pickled: a rank that fails to unpickle them has made the mesh.
    call: bytes


@dataclass(frozen=True)
class Answer:
    """What a rank sends back, pickled by value: torch's own pickler would share memory."""

    result: bytes = pickle.dumps(None)
    raised: bytes | None = None
    traceback: str | None = None
    collectives: int = 0  # so far, on the group of this request's mesh

    def value(self) -> Any:
        return pickle.loads(self.result)


def serve(rank: int, world_size: int, port: int, connection: Connection, folder: str) -> None:
    """Answers requests until the parent closes the connection."""
    _report_to(Path(folder), rank)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C reaches every process of a terminal; it is the parent that then kills the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=GLOO_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GLOO_TIMEOUT)
    connection.send_bytes(pickle.dumps(Answer()))
    meshes: dict[tuple[int, ...], DeviceMesh | None] = {}
    while True:
        try:
            request: Request = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_answer(request, rank, meshes)))


def _report_to(folder: Path, rank: int) -> None:
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()  # where gloo aborts, the log ends with the Python stack
    stack = open(folder / f"stack{rank}", "w")  # faulthandler keeps it open
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)


def _end_with_parent() -> None:
    """A rank that waits in gloo would outlive a parent that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(request: Request, rank: int, meshes: dict[tuple[int, ...], DeviceMesh | None]) -> Answer:
    mesh = None
    try:
        sys.path[:] = request.import_path
        mesh = _mesh(request, meshes)
        if rank not in request.mesh_ranks:
            return Answer()
        assert mesh is not None
        function, args, kwargs = pickle.loads(request.call)
        _reset(request.fresh_dynamo)
        result = pickle.dumps(function(mesh, *args, **kwargs))
        return Answer(result, collectives=_collectives(mesh))
    except BaseException as error:
        return Answer(
            raised=portable(error),
            traceback=traceback.format_exc(),
            collectives=_collectives(mesh),
        )
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _collectives(mesh: DeviceMesh | None) -> int:
    return 0 if mesh is None else mesh.get_group()._get_sequence_number_for_group()


def _reset(fresh_dynamo: bool) -> None:
    """No test sees what an earlier one has set."""
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if fresh_dynamo:
        torch._dynamo.reset()


def _mesh(request: Request, meshes: dict[tuple[int, ...], DeviceMesh | None]) -> DeviceMesh | None:
    """Every process calls this, as the making of a group is collective over all of them."""
    ranks = request.mesh_ranks
    world = dist.distributed_c10d._world
    if ranks not in meshes:
        if ranks == tuple(range(dist.get_world_size())):
            group: Any = dist.group.WORLD
        else:
            # Groups are named by this counter, and compiled code contains the name: one that
            # follows from the ranks lets Inductor's cache hit whatever tests ran before.
            world.group_count = int("1" + "".join(f"{rank:02d}" for rank in ranks))
            # DeviceMesh("cpu", ranks) would sort the ranks.
            group = ordered_group(list(ranks)) if list(ranks) != sorted(ranks) else dist.new_group(list(ranks))
        is_member = isinstance(group, dist.ProcessGroup)
        meshes[ranks] = DeviceMesh.from_group(group, "cpu") if is_member else None
    # A function that made groups on some ranks only has left the counters apart, so that the
    # members of a later group would wait for each other under different names. A mesh's number, above,
    # never starts with a 2.
    world.group_count = 2 * 10**20 + 1000 * request.number
    return meshes[ranks]


def import_on_rank(mesh: DeviceMesh, module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception:
        traceback.print_exc()
    gc.freeze()  # torch's own objects are many, and never garbage: to look at them again takes a tenth of all time


def portable(error: BaseException) -> bytes:
    """The pickled exception; if that fails, one of its type with its text, or one with its text."""
    kind, text = type(error), str(error)
    attempts: list[tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]] = [
        (kind, error.args, error.__dict__),
        (kind, (text,), {}),
        (RuntimeError, (f"{kind.__name__}: {text}",), {}),
    ]
    for attempt in attempts:
        try:
            pickled = pickle.dumps(_Exception(*attempt))
            pickle.loads(pickled)
        except Exception:
            continue
        return pickled
    raise AssertionError("an exception with a text only can always be pickled")


class _Exception:
    """Unpickles as the exception itself, without its `__init__`, which may want other arguments."""

    def __init__(self, kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> None:
        self.parts = kind, args, state

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self.parts


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
