"""A weight that is used twice, read beside its layer, checkpointed, replaced or copied: right, or refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils.checkpoint import checkpoint

from autoshard import InputError, autoshard, sharding_plan, unshard
from tests.compare import Result, Setting, loss_of, require_equal, train_both, train_case, whole
from tests.models import relative
from tests.pool import Pool
from tests.shared_weights import CASES, IDS, REPLICATED, TOWER, Penalised, RenormedAfterUse

# ---------------------------------------------------------------- tied, or read beside the layer


def train(mesh: DeviceMesh, settings: list[Setting]) -> list[Result]:
    return [train_case(mesh, CASES[setting.model], setting) for setting in settings]


@pytest.mark.parametrize("name", CASES)
def test_a_weight_that_is_used_twice_trains_as_in_one_process(pool: Pool, name: str) -> None:
    settings = [Setting(name)]
    if name != "attention_twice":
        settings.append(Setting(name, examples=True, steps=1))
    if name in ("shared_table", "tied_norm", "listed", "own_read"):
        settings.append(Setting(name, replicated=True))
        settings.append(Setting(name, plan="replicate", optimizer="adam", reduction="sum"))
    results = pool.run(train, settings, world_size=3, timeout=120)
    for place in range(len(settings)):
        require_equal([by_setting[place] for by_setting in results])
    strategies = results[0][0].strategies
    assert {parameter for parameter, strategy in strategies.items() if strategy == "replicate"} == REPLICATED[name]


@pytest.mark.parametrize(
    "name",
    ["shared_table", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tied_norm", "listed", "own_read"))],
)
def test_a_weight_that_is_used_twice_compiles_to_one_graph(pool: Pool, name: str) -> None:
    setting = Setting(name, backend="aot_eager")
    results = pool.run(train, [setting], world_size=2, fresh_dynamo=True, timeout=120)
    require_equal([result for (result,) in results])


def compile_tied_sparse(mesh: DeviceMesh) -> None:
    try:
        train(mesh, [Setting("tied_sparse", backend="eager")])
    except (
        Exception
    ) as error:  # Dynamo's, with ours in its text, and numbers of graphs that each rank counts for itself
        raise InputError(next(line for line in str(error).splitlines() if "table: " in line)) from error


def test_a_table_with_sparse_gradients_that_is_compiled_is_refused(pool: Pool) -> None:
    pool.expect_same_error(compile_tied_sparse, match=r"table: a table with sparse gradients is compiled", world_size=2)


def renorm_after_use(mesh: DeviceMesh | None, plan: str) -> None:
    model: nn.Module = RenormedAfterUse()
    if mesh is not None:
        model = autoshard(model, mesh, {"*": plan})
    model(torch.arange(4), torch.ones(2, 7)).sum().backward()


@pytest.mark.parametrize("plan", ["colwise", "replicate"])
def test_a_weight_that_is_renormed_after_it_was_used_has_no_gradient_as_in_torch(pool: Pool, plan: str) -> None:
    match = "modified by an inplace operation|modified inplace"
    with pytest.raises(RuntimeError, match=match):
        renorm_after_use(None, plan)
    pool.expect_same_error(renorm_after_use, plan, error=RuntimeError, match=match, world_size=2)


def ask_for_parameters(mesh: DeviceMesh) -> None:
    autoshard(Penalised(), mesh, "colwise")(torch.arange(4))


def test_parameters_that_are_asked_of_torch_are_refused_by_dtensor(pool: Pool) -> None:
    pool.expect_same_error(ask_for_parameters, error=RuntimeError, match="mixed torch.Tensor and DTensor", world_size=2)


# ---------------------------------------------------------------- outside of the model


Loss = Callable[[nn.Module, Tensor, int], Tensor]
ROWS = 3


def gradients_differ(mesh: DeviceMesh, original: Loss, sharded: Loss, compiled: bool = False) -> float:
    """The largest relative difference of gradients between a loss of the original and one of the sharded model."""
    world, rank = mesh.size(), mesh.get_local_rank()
    one = TOWER.make()
    other = autoshard(copy.deepcopy(one), mesh, "colwise")
    parts, (everything,) = IDS(world, ROWS, 1)
    original(one, everything, 0).backward()
    run = torch.compile(sharded, backend="aot_eager") if compiled else sharded
    run(other, parts[rank][0], rank).backward()
    return gradient_difference(one, other)


def gradient_difference(one: nn.Module, other: nn.Module) -> float:
    found = []
    for (name, want), (same, got) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert name == same
        pair = whole(want.grad), whole(got.grad)
        assert pair[0] is not None and pair[1] is not None, name
        found.append(relative(*pair))
    return max(found)


def mean_loss(out: Tensor, rank: int) -> Tensor:
    """Of all rows that are given; the mean over ranks is that of all ranks' rows."""
    return loss_of(out, rank * ROWS, out.size(0))


def plain_loss(model: nn.Module, ids: Tensor, rank: int) -> Tensor:
    return mean_loss(model(ids), rank)


def weight_of(model: nn.Module) -> Any:
    return model.get_parameter("table.weight")


def regularised_loss(model: nn.Module, ids: Tensor, rank: int) -> Tensor:
    return plain_loss(model, ids, rank) + weight_of(model).pow(2).sum()


def regularised_whole(model: nn.Module, ids: Tensor, rank: int) -> Tensor:
    return plain_loss(model, ids, rank) + weight_of(model).pow(2).sum().full_tensor()


def scored_loss(model: nn.Module, ids: Tensor, rank: int) -> Tensor:
    return mean_loss(model(ids)[..., :7] @ weight_of(model).T, rank)


def scored_whole(model: nn.Module, ids: Tensor, rank: int) -> Tensor:
    """Each rank has another gradient for the whole weight, and the weight's is their mean."""
    return mean_loss(model(ids)[..., :7] @ weight_of(model).full_tensor(grad_placements=[Partial("avg")]).T, rank)


def test_a_regulariser_over_a_sharded_weight_has_its_gradient(pool: Pool) -> None:
    results = pool.run(gradients_differ, regularised_loss, regularised_whole, world_size=3)
    assert max(results) <= 1e-12


def test_scores_by_a_sharded_weight_have_their_gradient(pool: Pool) -> None:
    assert max(pool.run(gradients_differ, scored_loss, scored_whole, world_size=3)) <= 1e-12


@pytest.mark.parametrize("loss", [regularised_loss, scored_loss])
def test_a_sharded_weight_outside_of_the_model_is_no_plain_tensor(pool: Pool, loss: Loss) -> None:
    pool.expect_same_error(
        gradients_differ, loss, loss, error=RuntimeError, match="mixed torch.Tensor and DTensor", world_size=2
    )


def checkpointed_loss(model: nn.Module, ids: Tensor, rank: int) -> Tensor:
    out = checkpoint(model, ids, use_reentrant=False)
    assert isinstance(out, Tensor)
    return mean_loss(out, rank)


def checkpointed_layers_loss(model: nn.Module, ids: Tensor, rank: int) -> Tensor:
    """The layers are called one by one, each in a checkpoint."""
    x: Any = ids
    for name in ("table", "layer", "norm", "recurrent"):
        x = checkpoint(model.get_submodule(name), x, use_reentrant=False)
    return mean_loss(checkpoint(model.get_submodule("head"), x[0], use_reentrant=False), rank)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("loss", [checkpointed_loss, checkpointed_layers_loss])
def test_a_checkpoint_around_a_sharded_model_computes_the_same(pool: Pool, loss: Loss, compiled: bool) -> None:
    results = pool.run(gradients_differ, plain_loss, loss, compiled, world_size=2, fresh_dynamo=compiled, timeout=120)
    assert max(results) <= 1e-12


def test_a_checkpoint_inside_of_the_model_compiles(pool: Pool) -> None:
    setting = Setting("checkpoint", backend="aot_eager")
    require_equal(pool.run(train_both, setting, world_size=2, fresh_dynamo=True, timeout=120))


def functional_loss(model: nn.Module, ids: Tensor, rank: int) -> Tensor:
    """The parameters are doubled, outside of the model."""
    parameters = {name: 2 * parameter for name, parameter in model.named_parameters()}
    return mean_loss(torch.func.functional_call(model, parameters, (ids,)), rank)


def test_functional_call_takes_parameters_made_of_the_sharded_ones(pool: Pool) -> None:
    assert max(pool.run(gradients_differ, functional_loss, functional_loss, world_size=3)) <= 1e-12


def functional_with_plain_tensors(mesh: DeviceMesh) -> None:
    whole_parameters = {name: p.detach().clone() for name, p in TOWER.make().named_parameters()}
    sharded = autoshard(TOWER.make(), mesh, "colwise")
    torch.func.functional_call(sharded, whole_parameters, (torch.arange(6).view(2, 3),))


def test_functional_call_refuses_whole_tensors_for_shards(pool: Pool) -> None:
    match = r"plain tensor of shape \(11, 7\) stands in its place; expected a DTensor.*named_parameters\(\)"
    pool.expect_same_error(functional_with_plain_tensors, error=InputError, match=match, world_size=2)


# ---------------------------------------------------------------- copies


def reloaded(model: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(model))
    return loaded


def train_a_copy(mesh: DeviceMesh, duplicate: Callable[[nn.Module], nn.Module], made: str) -> dict[str, Any]:
    """A copy trains as the original of the sharded model does, and leaves the sharded model as it is."""
    world, rank = mesh.size(), mesh.get_local_rank()
    case = CASES["tied_bag"] if made == "exported" else TOWER
    one = case.make()
    parts, (everything,) = IDS(world, ROWS, 1)
    plain: nn.Module = copy.deepcopy(one)
    if made == "graph":
        plain = fx.symbolic_trace(plain)
    sharded = autoshard(plain, mesh, "colwise", example_inputs=parts[rank] if made == "exported" else None)
    other = duplicate(sharded)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-4) for model in (one, other)]
    differences = []
    for _ in range(2):
        plain_loss(one, everything, 0).backward()
        plain_loss(other, parts[rank][0], rank).backward()
        differences.append(gradient_difference(one, other))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    untouched = relative(case.make()(parts[rank][0]), sharded(parts[rank][0]))
    trained = one(parts[rank][0])
    tied = other.get_parameter("head.weight") is other.get_parameter("table.weight")
    placed = all(isinstance(p, DTensor) for p in other.parameters())
    same_plan = sharding_plan(other) == sharding_plan(sharded)
    restored = relative(trained, unshard(other)(parts[rank][0]))
    kind = isinstance(other, fx.GraphModule if made == "graph" else type(one))
    return {
        "difference": max(*differences, untouched, restored),
        "facts": (tied, placed, same_plan, kind, isinstance(next(sharded.parameters()), DTensor)),
    }


@pytest.mark.parametrize(
    ("duplicate", "made"),
    [
        (copy.deepcopy, "traced"),
        (copy.deepcopy, "exported"),
        (copy.deepcopy, "graph"),
        (reloaded, "traced"),
        (reloaded, "exported"),
    ],
)
def test_a_copy_of_a_sharded_model_is_a_sharded_model(
    pool: Pool, duplicate: Callable[[nn.Module], nn.Module], made: str
) -> None:
    for found in pool.run(train_a_copy, duplicate, made, ranks=[2, 1], timeout=120):
        assert found["difference"] <= 1e-12
        assert found["facts"] == (True, True, True, True, True)
