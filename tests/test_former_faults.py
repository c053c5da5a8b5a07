"""The 13 faults of the former implementation of sharded lookups in torch (`torch.distributed._shard`): none is ours.

Each test bears the number and the name of the fault.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import autoshard
from passes.errors import IdRangeError
from tests.counting import counting_mesh
from tests.matrix.case import BAG, EMBEDDING, LINEAR, Case
from tests.matrix.run import run_cases
from tests.pool import Pool

INF = float("inf")
BAGS = Case(BAG, (9,), 17, 12, bags=4)


def assert_right(pool: Pool, *cases: Case, backend: str | None = None) -> None:
    """Each case trains for two steps as one process does."""
    for ranks in dict.fromkeys(case.ranks for case in cases):
        chosen = [case for case in cases if case.ranks == ranks]
        results = pool.run(run_cases, chosen, backend, ranks=ranks, timeout=120.0, fresh_dynamo=backend is not None)
        assert results == [[]] * len(ranks)


def look_up_ids_beyond(mesh: DeviceMesh, first: int, dtype: torch.dtype) -> Tensor:
    """A weighted bag for each of the eight ids from `first` on; row number first + i holds i."""
    weight = torch.zeros(first + 8, 2, dtype=dtype)
    weight[first:] = torch.arange(8).unsqueeze(1)
    table = nn.EmbeddingBag.from_pretrained(weight, mode="sum")
    model = autoshard(table, mesh, "colwise")
    ids = torch.arange(first, first + 8)
    with torch.no_grad():
        out: Tensor = model(ids, torch.arange(8), torch.ones(8, dtype=dtype))
    return out


def test_fault_01_ids_survive_per_sample_weights_dtype(pool: Pool) -> None:
    """They travelled as float32, which takes 2^24 + 1 for 2^24, or as bfloat16, which takes 257 for 256."""
    for first, dtype in ((2**24, torch.float32), (256, torch.bfloat16), (2048, torch.float16)):
        for out in pool.run(look_up_ids_beyond, first, dtype, world_size=2):
            assert out[:, 0].tolist() == list(range(8))


def test_fault_02_per_sample_weights_have_a_gradient_beside_offsets(pool: Pool) -> None:
    assert_right(pool, BAGS.but(weighted=True), BAGS.but(weighted=True, include_last_offset=True).on(0, 1, 2, 3))


def test_fault_03_batches_may_differ_in_size_between_ranks(pool: Pool) -> None:
    base = Case(BAG, (1,), 17, 12, ranks=(0, 1, 2, 3), mode="mean")
    assert_right(
        pool,
        base.but(sizes=(6, 6, 6, 6), bag_counts=(2, 9, 1, 4)),  # another number of bags, and more of them than ids
        base.but(sizes=(2, 9, 1, 4), bags=3),  # another number of ids
        base.but(sizes=(5, 0, 3, 0), bags=2),  # bags without ids
        base.but(sizes=(5, 0, 0, 0), bag_counts=(3, 0, 0, 0)),  # ranks without anything
        base.but(sizes=(0, 0, 0, 0), bag_counts=(0, 0, 0, 0)),
        base.but(sizes=(3, 5, 1, 2), bags=2, mode="sum", weighted=True),
    )


def test_fault_04_a_rank_may_have_no_columns(pool: Pool) -> None:
    for columns in (5, 1):
        kinds = (Case(EMBEDDING, (5, 4), 17, columns), BAGS.but(columns=columns), Case(LINEAR, (6, 17), 17, columns))
        assert_right(pool, *(kind.on(0, 1, 2, 3) for kind in kinds))


def step_with_max_norm(mesh: DeviceMesh, rows: int) -> tuple[Tensor, Tensor, list[int], bool]:
    """Before and after a forward: the table; what the norms' collective carries; is the weight still the leaf?"""
    counted, group = counting_mesh(mesh)
    torch.manual_seed(0)
    model = autoshard(nn.Embedding(rows, 6, max_norm=1.0), counted, "colwise")
    before = model.weight.full_tensor().detach().clone()
    with group.counting() as calls:
        model(torch.tensor([3, 3, 5])).sum().backward()
    after = model.weight.full_tensor().detach().clone()
    norms = [call.numel_in for call in calls if call.kind == "all_reduce"]
    return before, after, norms, model.weight.is_leaf and model.weight.grad is not None


def test_fault_05_max_norm_changes_what_is_looked_up_and_nothing_else(pool: Pool) -> None:
    for rows in (10, 1000):
        for before, after, norms, is_leaf in pool.run(step_with_max_norm, rows, world_size=2):
            untouched = [row for row in range(rows) if row not in (3, 5)]
            assert torch.equal(after[untouched], before[untouched])
            assert torch.allclose(after[[3, 5]].norm(dim=1), torch.ones(2))
            assert is_leaf
            assert norms == [6]  # one number per id of all ranks, however large the table
    base = Case(EMBEDDING, (5, 4), 17, 12)
    assert_right(
        pool,
        base.but(max_norm=2.0),  # no gradient through the renorm; the second step is right
        *(base.but(max_norm=bound, norm_type=p) for p, bound in ((INF, 1.5), (-INF, 0.05), (0.0, 11.0), (-1.0, 0.02))),
        base.but(max_norm=250.0, scale=100.0, dtype="float16"),  # a sum of squares that float16 does not hold
    )


def test_fault_06_outputs_can_be_viewed(pool: Pool) -> None:
    kinds = (Case(EMBEDDING, (5, 4), 17, 12), BAGS, Case(LINEAR, (6, 17), 17, 12))
    assert_right(pool, *(kind.but(viewed=True) for kind in kinds), *(kind.but(columns=9) for kind in kinds))


def frequencies(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """The gradient of a table whose gradients are divided by how often an id occurs, and what it must be."""
    model = autoshard(nn.Embedding(4, 6, scale_grad_by_freq=True), mesh, "colwise", gradient_reduction="sum")
    model(torch.tensor([0, 1, 1])).sum().backward()
    # Every id's gradients are as many ones as it occurs times on all ranks.
    return model.weight.grad.full_tensor(), torch.tensor([1.0, 1.0, 0.0, 0.0]).unsqueeze(1).expand(4, 6)


def test_fault_07_frequencies_sparse_gradients_and_a_tail_are_taken(pool: Pool) -> None:
    for got, want in pool.run(frequencies, world_size=2):
        assert torch.equal(got, want)
    assert_right(
        pool,
        Case(EMBEDDING, (5, 4), 7, 12, scale_grad_by_freq=True),
        Case(BAG, (5, 4), 17, 12, scale_grad_by_freq=True, balanced=True),
        Case(EMBEDDING, (5, 4), 17, 12, sparse=True),
        BAGS.but(sparse=True),
        BAGS.but(include_last_offset=True, tail=2),
    )


def look_up_a_bad_id(mesh: DeviceMesh, bad: int, bags: bool) -> None:
    layer = nn.EmbeddingBag(10, 6) if bags else nn.Embedding(10, 6)
    model = autoshard(nn.Sequential(layer), mesh, "colwise")
    ids = torch.full((2, 3), bad if mesh.get_local_rank() == 1 else 0)
    model(ids)


def test_fault_08_an_id_out_of_range_on_one_rank_is_told_on_all(pool: Pool) -> None:
    for bags in (False, True):
        for bad in (10, -1):
            text = pool.expect_same_error(look_up_a_bad_id, bad, bags, error=IdRangeError, world_size=4)
            assert text.startswith("0: ") and f"id {bad} " in text and "0 to 9" in text


def test_fault_09_ranks_of_a_subgroup_are_not_taken_for_places_in_it(pool: Pool) -> None:
    for ranks in ((2, 3), (3, 1), (3, 2, 1)):
        kinds = (Case(EMBEDDING, (5, 4), 17, 12), BAGS, Case(LINEAR, (6, 17), 17, 12))
        assert_right(pool, *(kind.on(*ranks) for kind in kinds))


def lookups_in_one_graph(mesh: DeviceMesh) -> tuple[int, int, list[str]]:
    """Graphs that Dynamo makes of a bag over all ranks, lookups in them, and calls of what waits for the device."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    model = torch.compile(autoshard(nn.EmbeddingBag(10, 6, mode="sum"), mesh, "colwise"), backend=keep, fullgraph=True)
    for _ in range(2):
        model(torch.tensor([[1, 2], [3, 3]]), per_sample_weights=torch.ones(2, 2)).sum().backward()
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    names = [getattr(target, "__name__", str(target)) for target in targets]
    waiting = [
        name for name in names if name.strip("_") in ("item", "tolist", "unique", "unique2", "local_scalar_dense")
    ]
    return len(graphs), sum(target is F.embedding_bag for target in targets), waiting


def test_fault_10_a_lookup_is_one_kernel_in_one_graph(pool: Pool) -> None:
    assert pool.run(lookups_in_one_graph, world_size=4, fresh_dynamo=True) == [(1, 1, [])] * 4
    assert_right(pool, BAGS.but(weighted=True), Case(EMBEDDING, (5, 4), 17, 12, max_norm=2.0), backend="aot_eager")


def test_fault_11_linear_takes_no_bias_one_row_and_uneven_features(pool: Pool) -> None:
    base = Case(LINEAR, (6, 17), 17, 12)
    assert_right(pool, base.but(bias=False), base.but(shape=(1, 17)), base.but(shape=(17,)), base.but(columns=11))
    assert_right(pool, base.but(then=5), base.but(columns=5, then=7).on(0, 1, 2, 3))


def test_fault_12_inputs_may_be_replicated(pool: Pool) -> None:
    kinds = (Case(EMBEDDING, (5, 4), 17, 12), BAGS, BAGS.but(weighted=True), Case(LINEAR, (6, 17), 17, 12))
    assert_right(pool, *(kind.but(replicated=True).on(*ranks) for kind in kinds for ranks in ((0, 1), (2, 3, 0, 1))))


def test_fault_13_gradients_are_means_or_sums_as_one_wants(pool: Pool) -> None:
    kinds = (Case(EMBEDDING, (5, 4), 17, 12), BAGS, Case(LINEAR, (6, 17), 17, 12))
    for gradients in ("mean", "sum"):
        assert_right(pool, *(kind.but(gradients=gradients).on(0, 1, 2, 3) for kind in kinds))
