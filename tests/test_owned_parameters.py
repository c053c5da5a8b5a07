"""Tables on some of the ranks: where their columns are, checkpoints, clipping, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard import (
    Colwise,
    IdRangeError,
    InputError,
    PlanError,
    ShardingPlan,
    autoshard,
    clip_grad_norm_,
    sharding_plan,
    unshard,
)
from autoshard.parameters import local_shapes, whole, whole_gradient
from tests import owned_models
from tests.models import relative
from tests.owned_models import TWELVE, Table
from tests.pool import Pool


def whole_state(model: nn.Module, mesh: DeviceMesh) -> dict[str, Tensor]:
    shapes = local_shapes(model)
    return {name: whole(p, shapes.get(name), mesh).clone() for name, p in model.named_parameters()}


def places(mesh: DeviceMesh) -> tuple[bool, bool, list[str]]:
    """Whether each rank holds its columns only, whether the values are kept, and what `unshard` gives back."""
    world, rank = mesh.size(), mesh.get_local_rank()
    model = owned_models.make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan = owned_models.plan(TWELVE, world)
    sharded = autoshard(model, mesh, plan, ragged=True)
    placed = True
    for name, parameter in sharded.named_parameters():
        strategy, table = plan[name], before[name]
        ranks = strategy.ranks if isinstance(strategy, Colwise) else tuple(range(world))
        pieces = table.chunk(len(ranks), 1)
        number = ranks.index(rank) if rank in ranks else len(pieces)
        mine = pieces[number] if number < len(pieces) else table[:, :0]
        local = parameter.detach().to_local()
        placed &= isinstance(parameter, DTensor) and torch.equal(local.reshape(mine.shape), mine)
        placed &= parameter.shape == table.shape
    kept = whole_state(sharded, mesh)
    exact = all(torch.equal(kept[name], value) for name, value in before.items())
    restored = unshard(sharded)
    return placed, exact, [n for n, p in restored.named_parameters() if not torch.equal(p.detach(), before[n])]


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [0, 1], [3, 1, 2]])
def test_every_rank_holds_its_columns_only_and_nothing_is_lost(pool: Pool, ranks: list[int]) -> None:
    assert pool.run(places, ranks=ranks) == [(True, True, [])] * len(ranks)


def trained(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = autoshard(owned_models.Tables(TWELVE).double(), mesh, owned_models.plan(TWELVE, mesh.size()), ragged=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    model(owned_models.batch(TWELVE, 4 + mesh.get_local_rank(), mesh.get_local_rank())).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def saved_and_loaded(mesh: DeviceMesh, folder: str) -> list[str]:
    """A checkpoint of the model and of Adam's state, loaded into another model; what then differs."""
    model, optimizer = trained(mesh, 0)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    other, its_optimizer = trained(mesh, 1)
    loaded = get_state_dict(other, its_optimizer)
    dcp.load({"model": loaded[0], "optimizer": loaded[1]}, checkpoint_id=folder)
    set_state_dict(other, its_optimizer, model_state_dict=loaded[0], optim_state_dict=loaded[1])
    wrong = [
        name
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True)
        if not torch.equal(p.detach().to_local(), q.detach().to_local())
    ]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[p].items():
            same = its_optimizer.state[q][key]
            a, b = (x.to_local() if isinstance(x, DTensor) else x for x in (value, same))
            if not torch.equal(a, b):
                wrong.append(key)
    return wrong


def test_a_checkpoint_brings_tables_and_optimizer_back(pool: Pool, tmp_path: Any) -> None:
    assert pool.run(saved_and_loaded, str(tmp_path), timeout=120) == [[]] * 4


def loaded_whole(mesh: DeviceMesh, folder: str) -> list[str]:
    """What was saved on many ranks, read on one as whole tables."""
    model, _ = trained(mesh, 0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    kept = whole_state(model, mesh)
    if mesh.get_local_rank() > 0:
        return []
    state = {"model": owned_models.make().state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return [name for name, value in state["model"].items() if not torch.equal(value, kept[name])]


def test_a_checkpoint_is_read_by_the_plain_model(pool: Pool, tmp_path: Any) -> None:
    assert pool.run(loaded_whole, str(tmp_path), timeout=120) == [[]] * 4


def clipped(mesh: DeviceMesh, norm_type: float, sparse: bool, ranks_differ: bool) -> list[float]:
    """The norm, and the largest relative difference of the clipped gradients, against torch in one process."""
    world, rank = mesh.size(), mesh.get_local_rank()
    model = nn.Sequential(owned_models.make(sparse=sparse), nn.LayerNorm(sum(t.dim for t in TWELVE))).double()
    reference = copy.deepcopy(model)
    plan = {f"0.{name}": s for name, s in owned_models.plan(TWELVE, world).items()}
    sharded = autoshard(model, mesh, plan if ranks_differ else "colwise", ragged=True, gradient_reduction="sum")
    batches = [owned_models.batch(TWELVE, 3 + r, r) for r in range(world)]
    sharded(batches[rank]).square().sum().backward()
    reference(owned_models.joined(TWELVE, batches)).square().sum().backward()
    for parameter in reference.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad.to_dense()
    wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
    got = clip_grad_norm_(sharded, 0.5, norm_type)
    shapes, worst = local_shapes(sharded), 0.0
    for (name, p), q in zip(sharded.named_parameters(), reference.parameters(), strict=True):
        gradient = whole_gradient(p, shapes.get(name), mesh)
        assert gradient is not None and q.grad is not None
        worst = max(worst, relative(q.grad, gradient))
    return [relative(wanted, got.to(wanted.dtype)), worst]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize(("sparse", "ranks_differ"), [(False, True), (True, True), (False, False)])
def test_gradients_are_clipped_by_the_norm_of_all(
    pool: Pool, norm_type: float, sparse: bool, ranks_differ: bool
) -> None:
    for result in pool.run(clipped, norm_type, sparse, ranks_differ, world_size=3):
        assert max(result) <= 1e-12


# ---------------------------------------------------------------- what is refused


def refused(mesh: DeviceMesh, kind: str) -> None:
    model: nn.Module = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4))
    placement: Any = Shard(0)
    plan: dict[str, Any] = {"0.*": Colwise((1,))}
    if kind == "linear":
        plan = {"1.*": Colwise((1,))}
    elif kind == "outside":
        plan = {"0.*": Colwise((0, 2))}
    elif kind == "descending":
        plan = {"0.*": Colwise((1, 0))}
    elif kind == "empty":
        plan = {"0.*": Colwise(())}
    elif kind == "replicated":
        placement = Replicate()
    elif kind == "max_norm":
        model[0] = nn.Embedding(9, 6, max_norm=1.0)
    autoshard(model, mesh, plan, input_placement=placement)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("linear", r"1\.weight: the parameter is used by a linear; expected the table"),
        ("outside", r"ranks \(0, 2\); expected ascending places in a mesh of 2 ranks"),
        ("descending", r"ranks \(1, 0\); expected ascending places"),
        ("empty", r"ranks \(\); expected ascending places"),
        ("replicated", r"the inputs are replicated.*input_placement=Shard\(0\)"),
        ("max_norm", r"the lookup has a max_norm.*\"colwise\""),
    ],
)
def test_what_cannot_be_on_some_ranks_is_refused(pool: Pool, kind: str, match: str) -> None:
    pool.expect_same_error(refused, kind, error=PlanError, match=match, world_size=2)


def bad_batch(mesh: DeviceMesh, kind: str) -> None:
    tables = (Table("offsets", 4, "mean" if kind == "mode" else "sum", weighted=True), Table("bags", 6))
    sharded = autoshard(owned_models.make(tables), mesh, {"*": Colwise((0,))}, ragged=kind != "sizes")
    inputs = owned_models.batch(tables, 3, 0)
    if kind == "weights":
        inputs["weights0"] = inputs["weights0"].detach().float()
    if mesh.get_local_rank() == 1:
        if kind == "id":
            inputs["ids1"][1, 1] = 21
        elif kind == "wrapped":
            inputs["ids0"][0] = 2**32 + 1
        elif kind == "negative":
            inputs["ids0"][0] = -1
        elif kind == "dtype":
            inputs["ids0"] = inputs["ids0"].float()
        elif kind == "offsets":
            inputs["offsets0"] = torch.tensor([0, 7, 2])
        elif kind == "overrun":
            inputs["offsets0"] = torch.tensor([0, 2, 99])
        elif kind == "sizes":
            inputs = owned_models.batch(tables, 4, 0)
        elif kind == "lengths":
            inputs["ids1"] = inputs["ids1"][:, :2]
    sharded(inputs)


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        ("id", IdRangeError, r"lookups\.1, rank 1: id 21 is out of range; expected ids from 0 to 20"),
        ("wrapped", IdRangeError, r"lookups\.0, rank 1: id 4294967297 is out of range"),
        ("negative", IdRangeError, r"lookups\.0, rank 1: id -1 is out of range"),
        ("dtype", InputError, r"lookups\.0, rank 1: the ids are no integers"),
        ("offsets", InputError, r"lookups\.0, rank 1: the offsets do not begin with 0, or do not ascend"),
        ("overrun", InputError, r"lookups\.0, rank 1: the last offset is 99, with \d+ ids"),
        ("sizes", InputError, r"the number of bags or rows differs.*ragged=True"),
        ("lengths", InputError, r"lookups\.1: the length of the bags differs"),
        ("weights", InputError, r"lookups\.0: weights per sample of torch\.float32; expected torch\.float64"),
        ("mode", InputError, r"lookups\.0: weights per sample in mode \"mean\"; expected mode \"sum\""),
    ],
)
def test_a_bad_batch_of_one_rank_is_told_on_all(pool: Pool, kind: str, error: type[Exception], match: str) -> None:
    pool.expect_same_error(bad_batch, kind, error=error, match=match, world_size=2)


def test_the_plan_says_where_columns_are_and_comes_back_from_json(pool: Pool) -> None:
    text, again, where = pool.run(plan_text, world_size=3)[0]
    assert again
    assert "colwise on 0, 2 (dim 1)" in text
    assert "16 bytes for an id of each rank, to gather them would take 24" in where
    assert "every rank owns a part, so that ids are gathered" in where


def plan_text(mesh: DeviceMesh) -> tuple[str, bool, str]:
    tables = (Table("bags", 6), Table("bags", 7), Table("bags", 9))
    spec = {"lookups.0.*": Colwise((0, 2)), "lookups.1.*": Colwise((0, 1, 2)), "*": "colwise"}
    plan = sharding_plan(autoshard(owned_models.make(tables), mesh, spec))
    other = sharding_plan(autoshard(owned_models.make(tables), mesh, ShardingPlan.from_json(plan.to_json())))
    same = [row.ranks for row in other.rows] == [row.ranks for row in plan.rows] == [(0, 2), None, None]
    return str(plan), same, " ".join(row.reason for row in plan.rows)
