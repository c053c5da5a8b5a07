"""A rank that dies, or does not come: the others end with an error within the time-out of the process group."""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import autoshard
from tests.pool import Pool, PoolDied, RankError


@pytest.fixture(scope="module")
def fragile() -> Iterator[Pool]:
    """A pool for the tests that lose its ranks; the others have time for their errors."""
    pool = Pool(world_size=3, grace=20.0)
    yield pool
    pool.close()


class _EndsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        os._exit(3)


def mesh_with_timeout(seconds: float) -> DeviceMesh:
    return DeviceMesh.from_group(dist.new_group(timeout=datetime.timedelta(seconds=seconds)), "cpu")


def step_without_rank_1(mesh: DeviceMesh, dies: bool) -> None:
    """One step of all ranks; in the second, rank 1 ends in the middle, or comes too late."""
    autoshard(nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 3)), mesh, "colwise")  # the first capture takes a while
    mesh = mesh_with_timeout(30 if dies else 3)
    model = autoshard(nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 3)), mesh, "colwise")
    model(torch.arange(4)).sum().backward()
    start = time.monotonic()
    absent = mesh.get_local_rank() == 1
    if absent and not dies:
        time.sleep(5)
        return
    try:
        out = model(torch.arange(4))
        (_EndsInBackward.apply(out) if absent else out).sum().backward()
    except Exception as error:
        raise RuntimeError(f"ended after {time.monotonic() - start:.0f} s: {error}") from error


def test_when_a_rank_does_not_come_the_others_end_at_the_time_out(fragile: Pool) -> None:
    with pytest.raises(RankError) as raised:
        fragile.run(step_without_rank_1, dies=False)
    exceptions = raised.value.exceptions
    assert exceptions[1] is None
    for rank in (0, 2):
        text = str(exceptions[rank])
        assert "Timed out waiting 3000ms" in text or "Connection closed by peer" in text
    assert any("Timed out waiting 3000ms" in str(exceptions[rank]) for rank in (0, 2))


def test_when_a_rank_dies_the_others_end_with_an_error(fragile: Pool) -> None:
    """Gloo knows the address of a peer, not its rank."""
    with pytest.raises(PoolDied, match=r"the processes of ranks \[1\] ended") as raised:
        fragile.run(step_without_rank_1, dies=True)
    text = str(raised.value)
    assert "rank 1 ended with exit code 3" in text
    for rank in (0, 2):
        assert f"rank {rank} Traceback" in text
    seconds = [int(number) for number in re.findall(r"RuntimeError: ended after (\d+) s", text)]
    assert len(seconds) == 2 and max(seconds) < 10
    assert "by peer" in text
