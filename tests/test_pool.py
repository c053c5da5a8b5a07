from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.pool import Pool, PoolDied, PoolTimeout, RankError
from tests.rank import portable


@pytest.fixture(scope="module")
def fragile() -> Iterator[Pool]:
    """A pool for the tests that lose their ranks: two start in half the time of four."""
    pool = Pool(world_size=2, grace=1.0)
    yield pool
    pool.close()


class TwoPartError(ValueError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def place(mesh: DeviceMesh) -> tuple[int, int, tuple[int, ...] | None]:
    return dist.get_rank(), mesh.get_group().rank(), mesh.get_coordinate()


def everyone(mesh: DeviceMesh) -> list[int]:
    """The ranks in the order in which they stand in the group."""
    found: list[int] = [-1] * mesh.size()
    dist.all_gather_object(found, dist.get_rank(), group=mesh.get_group())
    return found


def uses_default_group(mesh: DeviceMesh) -> bool:
    return mesh.get_group() is dist.group.WORLD


def full_tensor(mesh: DeviceMesh, tensor: Tensor) -> tuple[Tensor, Tensor]:
    sharded = distribute_tensor(tensor, mesh, [Shard(1)])
    return sharded.full_tensor(), sharded.to_local()


def change_state(mesh: DeviceMesh) -> None:
    torch.manual_seed(17)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)


def state(mesh: DeviceMesh) -> tuple[int, bool, torch.dtype]:
    return torch.initial_seed(), torch.is_grad_enabled(), torch.get_default_dtype()


def doubled(x: Tensor) -> Tensor:
    return x * 2


def count_and_run(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
    compiled_graphs.append(graph)
    return graph


compiled_graphs: list[torch.fx.GraphModule] = []


def compiled_frames(mesh: DeviceMesh) -> int:
    before = len(compiled_graphs)
    torch.compile(doubled, backend=count_and_run)(torch.ones(3))
    return len(compiled_graphs) - before


def raise_on(mesh: DeviceMesh, ranks: list[int], text: str = "no {rank}") -> int:
    rank = mesh.get_local_rank()
    if rank in ranks:
        raise TwoPartError("there is", text.format(rank=rank))
    return rank


def return_lock(mesh: DeviceMesh) -> Any:
    return threading.Lock()


def reduce_without_peer(mesh: DeviceMesh) -> None:
    if mesh.get_local_rank() == 0:
        dist.all_reduce(torch.ones(1), group=mesh.get_group())


def raise_without_peer(mesh: DeviceMesh) -> None:
    if mesh.get_local_rank() == 1:
        raise ValueError("left alone")
    dist.all_reduce(torch.ones(1), group=mesh.get_group())


def reduce_without_waiting_or_raise(mesh: DeviceMesh) -> None:
    if mesh.get_local_rank() == 1:
        raise ValueError("not reduced")
    dist.all_reduce(torch.ones(1), group=mesh.get_group(), async_op=True)


def end_process(mesh: DeviceMesh) -> int:
    if mesh.get_local_rank() == 1:
        os._exit(7)
    return 0


def reduce_different_sizes(mesh: DeviceMesh) -> None:
    dist.all_reduce(torch.ones(1 + 1000 * mesh.get_local_rank()), group=mesh.get_group())


def process_id(mesh: DeviceMesh) -> int:
    return os.getpid()


def group_of_some(mesh: DeviceMesh) -> None:
    dist.new_group(mesh.mesh.tolist())


def group_of_all(mesh: DeviceMesh) -> float:
    one = torch.ones(1)
    dist.all_reduce(one, group=dist.new_group(list(range(mesh.size()))))
    return one.item()


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [2, 3], [3], [2, 3, 0, 1], [3, 1]])
def test_mesh_and_results_are_in_the_order_given(pool: Pool, ranks: list[int]) -> None:
    expected = [(rank, place, (place,)) for place, rank in enumerate(ranks)]
    assert pool.run(place, ranks=ranks) == expected
    assert pool.run(everyone, ranks=ranks) == [ranks] * len(ranks)


def test_world_size_means_the_first_ranks(pool: Pool) -> None:
    assert pool.run(everyone, world_size=2) == [[0, 1]] * 2
    assert pool.run(everyone) == [[0, 1, 2, 3]] * 4
    assert all(pool.run(uses_default_group))


def test_impossible_meshes_are_refused(pool: Pool) -> None:
    for ranks in ([0, 1, 2, 3, 4], [0, 4], [1, 1], []):
        with pytest.raises(ValueError, match="ranks"):
            pool.run(place, ranks=ranks)
    with pytest.raises(ValueError, match="ranks"):
        pool.run(place, world_size=5)
    with pytest.raises(ValueError, match="ranks"):
        pool.run(place, world_size=3, ranks=[0, 1])


def test_dtensor_on_a_permuted_mesh(pool: Pool) -> None:
    tensor = torch.arange(30.0).reshape(5, 6)
    answers = pool.run(full_tensor, tensor, ranks=[2, 3, 0, 1])
    assert all(torch.equal(full, tensor) for full, _ in answers)
    assert [local.shape[1] for _, local in answers] == [2, 2, 2, 0]
    assert torch.equal(answers[0][1], tensor[:, :2])


def test_each_call_starts_from_the_same_state(pool: Pool) -> None:
    pool.run(change_state)
    assert pool.run(state) == [(0, True, torch.float32)] * 4


def test_fresh_dynamo_compiles_again(pool: Pool) -> None:
    counts = [pool.run(compiled_frames, world_size=1, fresh_dynamo=f) for f in (True, False, True)]
    assert counts == [[1], [0], [1]]


def test_groups_made_by_some_ranks_leave_later_groups_alone(pool: Pool) -> None:
    pool.run(group_of_some, ranks=[1, 2])
    assert pool.run(group_of_all) == [4.0] * 4


def test_error_on_one_rank(pool: Pool) -> None:
    before = pool.run(process_id)
    with pytest.raises(RankError, match="in raise_on") as caught:
        pool.run(raise_on, [1], ranks=[2, 3, 0])
    first, second, third = caught.value.exceptions
    assert first is None and third is None
    assert isinstance(second, TwoPartError) and str(second) == "there is no 1"
    assert "rank 3:\nTraceback" in str(caught.value) and "rank 2 returned" in str(caught.value)
    assert pool.run(process_id) == before


def test_result_that_cannot_be_pickled(pool: Pool) -> None:
    pool.expect_same_error(return_lock, error=TypeError, match="pickle")


def test_expect_same_error(pool: Pool) -> None:
    everywhere = [0, 1, 2, 3]
    text = pool.expect_same_error(raise_on, everywhere, text="peace", error=ValueError, match="pea")
    assert text == "there is peace"
    with pytest.raises(AssertionError, match="no rank raised ValueError"):
        pool.expect_same_error(raise_on, [], error=ValueError)
    with pytest.raises(AssertionError, match="'nothing', 'TwoPartError'"):
        pool.expect_same_error(raise_on, [1], world_size=2, error=ValueError)
    with pytest.raises(AssertionError, match="not KeyError"):
        pool.expect_same_error(raise_on, everywhere, text="peace", error=KeyError)
    with pytest.raises(AssertionError, match="different texts"):
        pool.expect_same_error(raise_on, everywhere, error=ValueError)
    with pytest.raises(AssertionError, match="'war' is not found in: there is peace"):
        pool.expect_same_error(raise_on, everywhere, text="peace", match="war")


def test_exceptions_keep_what_can_be_pickled() -> None:
    class Local(Exception):
        pass

    noted = ValueError("text", 3)
    noted.__dict__["where"] = "here"
    holding = ValueError(threading.Lock())
    found = [pickle.loads(portable(error)) for error in (noted, holding, Local("text"))]
    assert [type(error) for error in found] == [ValueError, ValueError, RuntimeError]
    assert found[0].args == ("text", 3) and found[0].where == "here"
    assert "_thread.lock" in str(found[1]) and str(found[2]) == "Local: text"


def test_time_out_shows_where_the_ranks_were(fragile: Pool) -> None:
    with pytest.raises(PoolTimeout, match=r"reduce_without_peer .* no answer from \[0\]") as caught:
        fragile.run(reduce_without_peer, timeout=3)
    assert "in reduce_without_peer" in caught.value.stacks[0]
    assert "rank 1 returned" in str(caught.value)
    assert fragile.run(everyone) == [[0, 1]] * 2


def test_error_while_another_rank_is_stuck(fragile: Pool) -> None:
    with pytest.raises(RankError, match="in raise_without_peer") as caught:
        fragile.run(raise_without_peer)
    assert caught.value.exceptions[0] is None
    assert isinstance(caught.value.exceptions[1], ValueError)
    assert "rank 0 gave no answer in 1.0 s" in str(caught.value)
    assert fragile.run(everyone) == [[0, 1]] * 2


def test_error_that_leaves_a_collective_behind(fragile: Pool) -> None:
    before = fragile.run(process_id)
    with pytest.raises(RankError, match="not reduced"):
        fragile.run(reduce_without_waiting_or_raise)
    assert fragile.run(everyone) == [[0, 1]] * 2
    assert fragile.run(process_id) != before


def test_process_that_ends(fragile: Pool) -> None:
    with pytest.raises(PoolDied, match="rank 1 ended with exit code 7"):
        fragile.run(end_process)
    assert fragile.run(everyone) == [[0, 1]] * 2


def test_process_that_gloo_aborts(fragile: Pool) -> None:
    with pytest.raises(PoolDied, match="in reduce_different_sizes"):
        fragile.run(reduce_different_sizes)
    assert fragile.run(everyone) == [[0, 1]] * 2
