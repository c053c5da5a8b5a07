"""A sharded model computes what one process computes on the batches of all ranks together."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard import autoshard, graph_diff, sharding_plan, unshard
from tests.compare import Setting, require_equal, train_both
from tests.models import MODELS
from tests.pool import Pool

PLAIN = ("mlp", "two_tower", "dlrm", "transformer")


def lookups_bit_equal(mesh: DeviceMesh, kind: str) -> bool:
    """Forward and weight gradient of one lookup, against torch.nn.functional in one process."""
    world, rank = mesh.size(), mesh.get_local_rank()
    torch.manual_seed(0)
    table = torch.randn(17, 11, dtype=torch.float64)
    ids = torch.randint(0, 17, (3 * world, 5))
    up = torch.randn(3 * world, 11, dtype=torch.float64)
    layer: nn.Module
    if kind == "embedding":
        layer, up = nn.Embedding.from_pretrained(table.clone(), freeze=False), up.unsqueeze(1).expand(-1, 5, -1)
    else:
        layer = nn.EmbeddingBag.from_pretrained(table.clone(), freeze=False, mode=kind)
    whole = table.clone().requires_grad_()
    expected = F.embedding(ids, whole) if kind == "embedding" else F.embedding_bag(ids, whole, mode=kind)
    (expected * up).sum().backward()
    sharded = autoshard(layer, mesh, "paired", gradient_reduction="sum")
    rows = slice(3 * rank, 3 * rank + 3)
    out = sharded(ids[rows])
    (out * up[rows]).sum().backward()
    gradient = sharded.weight.grad
    assert isinstance(gradient, DTensor)
    assert whole.grad is not None
    return torch.equal(out, expected[rows]) and torch.equal(gradient.full_tensor(), whole.grad)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["embedding", "sum", "mean", "max"])
def test_lookups_are_bit_equal_in_eager_mode(pool: Pool, kind: str, world_size: int) -> None:
    assert all(pool.run(lookups_bit_equal, kind, world_size=world_size))


@pytest.mark.parametrize("ranks", [[2, 3, 0, 1], [3, 0, 1, 2], [2, 3], [3, 1]])
def test_lookups_are_bit_equal_in_the_order_of_the_mesh(pool: Pool, ranks: list[int]) -> None:
    assert all(pool.run(lookups_bit_equal, "sum", ranks=ranks))


@pytest.mark.parametrize(
    ("world_size", "optimizer"),
    [
        *((world_size, "adam") for world_size in (1, 2, 3, 4)),
        *(pytest.param(world_size, "sgd", marks=pytest.mark.slow) for world_size in (1, 3, 4)),
        (2, "sgd"),
    ],
)
def test_training_is_that_of_one_process(pool: Pool, world_size: int, optimizer: str) -> None:
    for model in PLAIN:
        require_equal(pool.run(train_both, Setting(model, optimizer=optimizer), world_size=world_size))


@pytest.mark.parametrize(
    "model", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("dlrm", "transformer", "mlp")), "two_tower"]
)
def test_compiled_training_is_that_of_one_process(pool: Pool, model: str) -> None:
    setting = Setting(model, backend="aot_eager")
    require_equal(pool.run(train_both, setting, world_size=3, fresh_dynamo=True, timeout=120))


@pytest.mark.parametrize("model", PLAIN)
def test_gradients_may_be_sums(pool: Pool, model: str) -> None:
    require_equal(pool.run(train_both, Setting(model, reduction="sum"), world_size=3))


@pytest.mark.parametrize("model", PLAIN)
def test_a_plan_that_replicates_everything_computes_the_same(pool: Pool, model: str) -> None:
    results = pool.run(train_both, Setting(model, plan="replicate"), world_size=2)
    assert set(results[0].strategies.values()) == {"replicate"}
    require_equal(results)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", PLAIN)
def test_a_random_mix_of_strategies_computes_the_same(pool: Pool, model: str, seed: int) -> None:
    draw = random.Random(seed)
    names = [name for name, _ in MODELS[model].make().named_parameters()]
    plan = {name: draw.choice(["colwise", "replicate"]) for name in names if "norm" not in name}
    weights = {name: strategy for name, strategy in plan.items() if name.endswith("weight")}
    require_equal(pool.run(train_both, Setting(model, plan=weights), world_size=2))


@pytest.mark.parametrize("model", PLAIN)
def test_replicated_inputs_compute_what_one_process_does(pool: Pool, model: str) -> None:
    require_equal(pool.run(train_both, Setting(model, replicated=True), world_size=3))


def names_and_values(mesh: DeviceMesh, name: str) -> tuple[bool, bool, bool]:
    model = MODELS[name].make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sharded = autoshard(model, mesh, "paired")
    state = sharded.state_dict()
    same_names = list(state) == list(before)
    whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
    exact = all(torch.equal(whole[key], value) for key, value in before.items())
    restored = unshard(sharded).state_dict()
    back = list(restored) == list(before) and all(torch.equal(restored[key], before[key]) for key in before)
    return same_names, exact, back


@pytest.mark.parametrize("model", [*PLAIN, "tied_head", "batch_norm"])
def test_names_and_exact_values_survive_sharding_and_unsharding(pool: Pool, model: str) -> None:
    for world_size in (2, 4):
        assert pool.run(names_and_values, model, world_size=world_size) == [(True, True, True)] * world_size


def text_hash(mesh: DeviceMesh, name: str) -> str:
    model = autoshard(MODELS[name].make(), mesh, "paired")
    text = "\n".join([*graph_diff(model).lines(), sharding_plan(model).to_json()])
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("model", PLAIN)
def test_every_rank_has_the_same_graph_text(pool: Pool, model: str) -> None:
    assert len(set(pool.run(text_hash, model))) == 1


def initialised_on_meta(mesh: DeviceMesh) -> list[Any]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(400, 6), nn.Linear(6, 5), nn.BatchNorm1d(5))
    sharded = autoshard(model, mesh, "paired")
    state = sharded.state_dict()
    whole = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}
    largest = max(v.to_local().numel() for name, v in state.items() if isinstance(v, DTensor) and name == "0.weight")
    return [largest, {name: value.double().tolist() for name, value in whole.items()}]


def test_a_meta_model_is_initialised_shard_by_shard(pool: Pool) -> None:
    results = pool.run(initialised_on_meta, world_size=2)
    assert [largest for largest, _ in results] == [400 * 3, 400 * 3]
    assert results[0][1] == results[1][1]
    table = torch.tensor(results[0][1]["0.weight"])
    assert abs(float(table.mean())) < 0.1
    assert abs(float(table.std()) - 1) < 0.1
    assert not torch.equal(table[:, :3], table[:, 3:])
    assert results[0][1]["2.running_var"] == [1.0] * 5
    assert max(abs(v) for row in results[0][1]["1.weight"] for v in row) <= 6**-0.5


def view_of(mesh: DeviceMesh) -> tuple[int, ...]:
    model = autoshard(nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5)), mesh, "paired")
    out: Tensor = model(torch.arange(4).view(2, 2))
    return tuple(out.view(-1).shape)


def test_outputs_are_contiguous(pool: Pool) -> None:
    assert pool.run(view_of, world_size=3) == [(20,)] * 3
