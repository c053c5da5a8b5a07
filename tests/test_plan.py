"""Plans: a row with a reason for every weight, what a person may ask for, and the plan as JSON and as a table."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import PlanError, PlanRow, ShardingPlan, autoshard, sharding_plan
from autoshard.capture import Capture, capture
from autoshard.export import capture_export
from autoshard.planner import PlanSpec, make_plan
from passes.pipeline import normalize
from tests.captures import LADDERS, by_ladder, captured_once
from tests.models import MODELS, layers
from tests.pool import Pool


def plan_of(
    model: nn.Module, spec: PlanSpec = "colwise", world_size: int = 2, found: Capture | None = None
) -> ShardingPlan:
    return make_plan(model, found or capture(model), spec, world_size)


def plan_for(name: str, spec: PlanSpec = "colwise", world_size: int = 2, ladder: str = "fx") -> ShardingPlan:
    model, found = captured_once(name, ladder)
    return plan_of(model, spec, world_size, found)


@functools.cache
def colwise(name: str, ladder: str = "fx") -> ShardingPlan:
    """For tests that only look."""
    return plan_for(name, ladder=ladder)


def strategies(plan: ShardingPlan) -> dict[str, str]:
    return {row.parameter: row.strategy for row in plan.rows}


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(("name", "ladder"), by_ladder(*MODELS))
def test_every_weight_and_bias_of_a_layer_has_one_row_with_a_reason(name: str, ladder: str) -> None:
    plan = colwise(name, ladder)
    named = [alias for row in plan.rows for alias in (row.parameter, *row.aliases)]
    assert len(set(named)) == len(named)
    expected = {
        f"{path}.{key}" for path, layer in layers(MODELS[name].make()).items() for key, _ in layer.named_parameters()
    }
    assert set(named) >= expected
    assert all(row.reason for row in plan.rows)


@pytest.mark.parametrize(("name", "ladder"), by_ladder(*MODELS))
def test_colwise_shards_what_has_a_feature_axis(name: str, ladder: str) -> None:
    plan = colwise(name, ladder)
    replicated = {row.parameter for row in plan.rows if row.strategy == "replicate"}
    if MODELS[name].whole or ladder == "fx":
        assert replicated == MODELS[name].replicated
    model = MODELS[name].make()
    tables = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    for path, layer in layers(model).items():
        for key, parameter in layer.named_parameters():
            row = plan.row(f"{path}.{key}")
            assert row.dim == (None if row.strategy == "replicate" else 1 if id(parameter) in tables else 0)
            assert row.shape == tuple(parameter.shape)
            assert row.dtype == "float64"


def test_sites_without_a_layer_have_rows_too() -> None:
    """F.embedding and F.linear on parameters of the model's own, whether a layer stands beside them or not."""
    for ladder in LADDERS:
        plan = colwise("functional", ladder)
        assert {(row.parameter, row.strategy, row.dim) for row in plan.rows} == {
            ("table", "colwise", 1),
            ("bag", "colwise", 1),
            ("weight", "colwise", 0),
            ("bias", "colwise", 0),
        }


class FunctionalPart(nn.Module):
    """x (B, 5) -> (B, 7), by a weight of its own and no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class UntracedParent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = FunctionalPart()
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.part(x)
        return self.last(hidden if mask is None else hidden * mask)


def test_a_part_without_layers_is_traced_where_its_parent_cannot_be() -> None:
    model = UntracedParent()
    plan = plan_of(model)
    assert strategies(plan)["part.weight"] == "colwise"


def test_rows_come_in_the_order_of_the_model() -> None:
    for name in ("two_tower", "transformer", "attention"):
        order = [parameter for parameter, _ in MODELS[name].make().named_parameters()]
        rows = [row.parameter for row in colwise(name).rows]
        assert rows == [parameter for parameter in order if parameter in set(rows)]


def test_a_row_names_the_layers_that_use_the_parameter() -> None:
    assert colwise("two_tower").row("user_tower.0.weight").sites == ("linear user_tower.0",)
    assert colwise("two_tower").row("user_tower.0.bias").sites == ("linear user_tower.0",)
    assert colwise("dlrm").row("tables.4.weight").sites == ("embedding_bag tables.4",)
    assert colwise("tied_tables").row("one.weight").sites == ("embedding one", "embedding_bag other")


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize(("world_size", "each"), [(1, 7), (2, 4), (3, 3), (4, 2), (9, 1)])
def test_a_reason_tells_the_columns_of_a_rank(world_size: int, each: int, ladder: str) -> None:
    reason = plan_for("lookup", world_size=world_size, ladder=ladder).row("table.weight").reason
    assert reason.endswith(f"7 columns, {each} per rank")


def test_a_reason_names_the_part_of_the_plan_that_it_follows() -> None:
    for name in ("auto", "paired"):
        assert plan_for("mlp", name).row("0.weight").reason.startswith(f'plan "{name}"')
    assert plan_for("mlp", "colwise").row("0.weight").reason.startswith('plan "colwise"')
    plan = plan_for("mlp", {"0.*": "colwise", "2.*": "replicate"})
    assert plan.row("0.weight").reason.startswith("plan '0.*'")
    assert plan.row("2.weight").reason == "plan '2.*'"
    assert plan.row("4.weight").reason == "no entry of the plan names it"


@pytest.mark.parametrize(
    ("name", "ladder", "parameter", "reason"),
    [
        ("tied_head", "fx", "head.bias", "tied to a table"),
        ("tied_head", "export", "head.bias", "tied to a table"),
        ("child_reader", "fx", "tokens.weight", "also used by"),
        ("child_reader", "export", "tokens.weight", "also used by"),
        ("indexed", "fx", "table.weight", "also used by getitem"),
        ("indexed", "export", "table.weight", "also used by index"),
        ("untraceable_child_reader", "fx", "tokens.weight", "UntraceableChildReader"),
        ("untraceable_child_reader", "fx", "layer.bias", "UntraceableChildReader"),
        ("untraceable_child_reader", "fx", "layer.weight", "as layer.bias"),
        ("aliased_child_reader", "fx", "tokens.weight", "AliasedChildReader"),
    ],
)
def test_what_is_not_sharded_has_the_reason(name: str, ladder: str, parameter: str, reason: str) -> None:
    row = colwise(name, ladder).row(parameter)
    assert row.strategy == "replicate"
    assert reason in row.reason


def test_another_use_is_named_with_its_line() -> None:
    reason = colwise("child_reader").row("tokens.weight").reason
    file, _, line = reason.rpartition(" at ")[2].rpartition(":")
    assert "self.tokens.weight.T" in open(file).readlines()[int(line) - 1]


def test_a_weight_that_is_read_inside_of_torch_itself_is_replicated() -> None:
    """nn.MultiheadAttention hands out_proj's weight to a function; its own forward runs as it is."""
    plan = colwise("attention")
    assert strategies(plan)["attention.out_proj.weight"] == "replicate"
    assert "attention" in plan.row("attention.out_proj.weight").reason
    assert strategies(plan)["embed.weight"] == strategies(plan)["last.weight"] == "colwise"


class OneDimensional(nn.Module):
    """A weight (in,), which gives one number a row, and a bias that is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(5))
        self.weight = nn.Parameter(torch.randn(4, 5))
        self.shift = nn.Parameter(torch.randn(1))
        self.layer = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        linear = nn.functional.linear
        return linear(x, self.vector).sum() + linear(x, self.weight, self.shift).sum() + self.layer(x)


@pytest.mark.parametrize("ladder", LADDERS)
def test_weights_without_a_feature_axis_are_replicated_with_the_reason(ladder: str) -> None:
    model = OneDimensional()
    found = capture(model) if ladder == "fx" else capture_export(model, (torch.randn(3, 5),))
    plan = plan_of(model, found=found)
    assert strategies(plan) == {
        "vector": "replicate",
        "weight": "replicate",
        "shift": "replicate",
        "layer.weight": "colwise",
        "layer.bias": "colwise",
    }
    assert "no feature axis" in plan.row("vector").reason
    assert "no feature axis" in plan.row("shift").reason
    assert "shift" in plan.row("weight").reason


class SharedBias(nn.Module):
    """One bias of three linears, one of which is tied to a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 5)
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(5, 6)
        self.third = nn.Linear(5, 6)
        self.second.bias = self.first.bias
        self.third.weight = self.table.weight
        self.third.bias = self.first.bias

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.first(x) + self.second(x) + self.third(x)


def test_what_shares_a_bias_is_decided_together() -> None:
    """The tied linear keeps the bias whole, and so the others' weights; it does not need its own weight whole."""
    plan = plan_of(SharedBias())
    assert strategies(plan) == {
        "table.weight": "colwise",
        "first.weight": "replicate",
        "first.bias": "replicate",
        "second.weight": "replicate",
    }
    assert plan.row("second.weight").reason == "as first.bias, which it is used with"
    assert plan.row("third.weight") is plan.row("table.weight")
    assert plan.row("table.weight").dim == 1
    assert set(plan.row("first.bias").aliases) == {"second.bias", "third.bias"}


@pytest.mark.parametrize("ladder", LADDERS)
def test_a_table_that_is_tied_to_a_linear_keeps_its_own_feature_axis(ladder: str) -> None:
    row = colwise("tied_head", ladder).row("head.weight")
    assert (row.parameter, row.strategy, row.dim) == ("tokens.weight", "colwise", 1)
    assert set(row.sites) == {"embedding tokens", "linear head"}
    assert "tied: the linear takes its input columns" in row.reason


def test_a_weight_inside_of_a_condition_is_not_sharded() -> None:
    """Ranks whose batches decide differently would wait for each other's collectives."""

    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(6, 6)
            self.other = nn.Linear(6, 6)
            self.last = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: self.other(x), (x,)))

    model = Conditional()
    plan = plan_of(model, found=capture_export(model, (torch.randn(3, 6),)))
    assert strategies(plan) == {
        **dict.fromkeys(("one.weight", "one.bias", "other.weight", "other.bias"), "replicate"),
        **dict.fromkeys(("last.weight", "last.bias"), "colwise"),
    }


# ---------------------------------------------------------------- notes


def test_notes_name_what_runs_as_it_is() -> None:
    notes = colwise("optional_mask").notes
    assert len(notes) == 1
    assert notes[0].startswith("the model runs as it is: ")
    assert "mask is not None" in notes[0]
    assert any(note.startswith("attention runs as it is: ") for note in colwise("attention").notes)
    assert colwise("mlp").notes == ()


def test_notes_name_what_mixes_rows_of_the_batch() -> None:
    assert [note for note in colwise("batch_norm").notes if "own rows" in note] == [
        "norm (BatchNorm1d) sees each rank's own rows in training, as under DDP"
    ]
    model = nn.SyncBatchNorm.convert_sync_batchnorm(MODELS["batch_norm"].make())
    assert not any("own rows" in note for note in plan_of(model).notes)


# ---------------------------------------------------------------- what a person asks for


def test_the_first_glob_that_matches_counts() -> None:
    plan = plan_for("mlp", {"0.weight": "replicate", "0.*": "colwise", "*.weight": "colwise"})
    assert strategies(plan) == {
        "0.weight": "replicate",
        "0.bias": "replicate",
        "2.weight": "colwise",
        "4.weight": "replicate",
        "4.bias": "replicate",
    }
    assert plan.row("0.bias").reason == "as 0.weight, which it is used with"


def test_an_empty_mapping_replicates_everything() -> None:
    assert set(strategies(plan_for("two_tower", {})).values()) == {"replicate"}


def test_a_glob_may_use_any_name_of_a_tied_parameter() -> None:
    plan = plan_for("tied_tables", {"other.weight": "colwise"})
    assert strategies(plan) == {"one.weight": "colwise"}
    assert plan.row("other.weight") is plan.row("one.weight")
    assert plan.sharded == {"one.weight", "other.weight"}


def test_a_glob_with_a_wildcard_may_cover_what_cannot_be_sharded() -> None:
    plan = plan_for("child_reader", {"*": "colwise"})
    assert strategies(plan)["tokens.weight"] == "replicate"
    assert "also used by" in plan.row("tokens.weight").reason


def test_a_glob_may_name_parameters_that_belong_to_no_layer() -> None:
    assert strategies(plan_for("parameters", {"shift": "replicate", "*": "colwise"}))["layer.weight"] == "colwise"


def test_names_with_brackets_and_case_are_not_taken_for_others() -> None:
    model = nn.ModuleDict({"A": nn.Linear(3, 2), "a": nn.Linear(3, 2)})
    plan = plan_of(model, {"A.*": "colwise"})
    assert strategies(plan) == {
        "A.weight": "colwise",
        "A.bias": "colwise",
        "a.weight": "replicate",
        "a.bias": "replicate",
    }


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("rowwise", ["plan", "'rowwise'", "auto, colwise, paired"]),
        ({"0.weight": "diagonal"}, ["'0.weight'", "'diagonal'", "colwise, rowwise, replicate"]),
        ({"5.*": "colwise"}, ["'5.*'", "matches no parameter", "0.weight, 0.bias"]),
        ({"*": "colwise", "5.*": "replicate"}, ["'5.*'", "matches no parameter"]),
        (7, ["plan", "7", "a ShardingPlan", "a mapping"]),
        (None, ["plan", "None"]),
    ],
)
def test_a_plan_that_cannot_be_followed_is_an_error(spec: PlanSpec, parts: list[str]) -> None:
    with pytest.raises(PlanError) as raised:
        plan_for("mlp", spec)
    assert all(part in str(raised.value) for part in [*parts, "; expected "])


@pytest.mark.parametrize(
    ("name", "parameter", "reason"),
    [
        ("tied_head", "head.bias", "tied to a table"),
        ("parameters", "shift", "no traced layer uses it"),
        ("child_reader", "tokens.weight", "also used by"),
    ],
)
def test_what_is_asked_for_by_its_full_name_and_cannot_be_sharded_is_an_error(
    name: str, parameter: str, reason: str
) -> None:
    with pytest.raises(PlanError, match=reason) as raised:
        plan_for(name, {parameter: "colwise"})
    assert repr(parameter) in str(raised.value)


# ---------------------------------------------------------------- rowwise


def test_rowwise_shards_the_input_axis_and_keeps_the_bias_whole() -> None:
    plan = plan_for("mlp", {"4.*": "rowwise", "*": "colwise"})
    row, bias = plan.row("4.weight"), plan.row("4.bias")
    assert (row.strategy, row.dim, row.sizes(2)) == ("rowwise", 1, [3, 3])
    assert row.reason == "plan '4.*': 6 input columns, 3 per rank"
    assert (bias.strategy, bias.dim) == ("replicate", None)
    assert bias.reason == "the bias of a linear that is sharded by input column: added once, after the sum over ranks"
    assert "rowwise (dim 1)" in str(plan)
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert strategies(plan_for("mlp", plan)) == strategies(plan)
    assert {"4.weight", "0.weight"} < plan.sharded
    assert "4.bias" not in plan.sharded


@pytest.mark.parametrize(
    ("name", "spec", "fact"),
    [
        ("two_tower", {"users.weight": "rowwise"}, "a table of embedding users"),
        ("two_tower", {"user*": "rowwise"}, "a table of embedding users"),
        ("tied_head", {"head.weight": "rowwise"}, "a table of embedding tokens"),
        ("mlp", {"0.b*": "rowwise", "*": "colwise"}, "a bias of linear 0"),
        ("mlp", {"0.bias": "rowwise", "0.weight": "rowwise"}, "added once"),
        ("mlp", {"0.bias": "colwise", "0.weight": "rowwise"}, "added once"),
        ("batch_norm", {"norm.weight": "rowwise"}, "no traced layer uses it"),
    ],
)
def test_what_is_no_weight_of_a_linear_cannot_be_rowwise(name: str, spec: PlanSpec, fact: str) -> None:
    with pytest.raises(PlanError, match=f"{fact}.*; expected .*Ask for"):
        plan_for(name, spec)


def test_a_rowwise_glob_covers_what_cannot_be_sharded() -> None:
    plan = plan_for("attention", {"attention.*": "rowwise"})
    assert set(strategies(plan).values()) == {"replicate"}
    assert "attention" in plan.row("attention.out_proj.weight").reason


def paired(model: nn.Module, world_size: int = 2) -> list[str]:
    found = capture(model)
    for region in found.regions:
        normalize(region.graph)
    rows = plan_of(model, "paired", world_size, found).rows
    return [row.strategy for row in rows if row.parameter.endswith("weight")]


def test_the_paired_plan_takes_every_other_linear_of_a_chain_rowwise() -> None:
    layers = [layer for _ in range(5) for layer in (nn.Linear(6, 6), nn.ReLU())]
    assert paired(nn.Sequential(*layers)) == ["colwise", "rowwise", "colwise", "rowwise", "colwise"]
    model = nn.Sequential(nn.EmbeddingBag(9, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6))
    assert paired(model) == ["colwise", "rowwise", "colwise", "rowwise"]


def test_the_paired_plan_does_not_scatter_more_than_it_saves() -> None:
    assert paired(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 10)), 4) == ["colwise", "rowwise"]
    assert paired(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 11)), 4) == ["colwise", "colwise"]


class BehindTied(nn.Module):
    """Behind a linear that is tied to a table stands another."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.last = nn.Embedding(9, 6), nn.Linear(6, 9), nn.Linear(9, 4)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(torch.relu(self.head(self.table(ids))))


def test_the_paired_plan_keeps_no_bias_whole_that_others_have_sharded() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 6))
    assert paired(model) == ["colwise", "rowwise", "colwise"]
    model[2].bias = model[3].bias
    assert paired(model) == ["colwise", "colwise", "colwise"]


def test_the_paired_plan_gives_rows_to_what_follows_a_tied_linear() -> None:
    assert paired(BehindTied()) == ["colwise", "colwise"]


class UsedTwice(nn.Module):
    """A linear that is fed by columns once, and by the input once; then by itself."""

    def __init__(self, twice: str) -> None:
        super().__init__()
        self.one, self.other, self.twice = nn.Linear(6, 6), nn.Linear(6, 6), twice

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(torch.relu(self.one(x)))
        if self.twice == "input":
            return out + self.other(x)
        return self.other(out) if self.twice == "itself" else out


@pytest.mark.parametrize(("twice", "strategy"), [("no", "rowwise"), ("input", "colwise"), ("itself", "colwise")])
def test_the_paired_plan_asks_that_all_uses_of_a_weight_take_columns(twice: str, strategy: str) -> None:
    assert paired(UsedTwice(twice)) == ["colwise", strategy]


# ---------------------------------------------------------------- a plan as a plan


@pytest.mark.parametrize("name", ["mlp", "tied_head", "optional_mask", "batch_norm"])
def test_a_plan_is_followed_when_it_is_given_as_plan(name: str) -> None:
    first = plan_for(name, {"*": "colwise"})
    again = plan_for(name, ShardingPlan.from_json(first.to_json()))
    assert strategies(again) == strategies(first)
    assert [row.dim for row in again.rows] == [row.dim for row in first.rows]


def test_an_edited_plan_is_followed() -> None:
    plan = plan_for("mlp")
    rows = tuple(
        dataclasses.replace(row, strategy="replicate", dim=None) if row.parameter == "2.weight" else row
        for row in plan.rows
    )
    edited = plan_for("mlp", dataclasses.replace(plan, rows=rows))
    assert strategies(edited) == {**strategies(plan), "2.weight": "replicate"}


def test_a_plan_of_another_world_size_is_followed_over_this_one() -> None:
    plan = plan_for("lookup", plan_for("lookup", world_size=4), world_size=2)
    assert plan.world_size == 2
    assert plan.row("table.weight").reason.endswith("4 per rank")


@pytest.mark.parametrize(("one", "other"), [("item[id]", "itemi"), ("a*", "ab")])
def test_a_name_in_a_plan_is_no_glob(one: str, other: str) -> None:
    model = nn.ModuleDict({one: nn.Linear(3, 2), other: nn.Linear(3, 2)})
    plan = plan_of(model)
    rows = tuple(row for row in plan.rows if row.parameter.startswith(f"{one}."))
    again = plan_of(model, dataclasses.replace(plan, rows=rows))
    assert strategies(again) == {
        f"{one}.weight": "colwise",
        f"{one}.bias": "colwise",
        f"{other}.weight": "replicate",
        f"{other}.bias": "replicate",
    }


def test_the_full_name_of_a_parameter_matches_it_whatever_characters_it_has() -> None:
    model = nn.ModuleDict({"item[id]": nn.Linear(3, 2)})
    plan = plan_of(model, {"item[id].weight": "colwise", "*": "colwise"})
    assert plan.row("item[id].weight").strategy == "colwise"


@pytest.mark.parametrize("change", [{"parameter": "9.weight"}, {"shape": (11, 12)}])
def test_a_plan_for_another_model_is_an_error(change: dict[str, object]) -> None:
    plan = plan_for("mlp")
    rows = (dataclasses.replace(plan.rows[0], **change), *plan.rows[1:])  # type: ignore[arg-type]  # of both fields
    with pytest.raises(PlanError, match="plan row"):
        plan_for("mlp", dataclasses.replace(plan, rows=rows))


def test_a_strategy_that_does_not_exist_in_a_plan_is_an_error() -> None:
    plan = plan_for("mlp")
    rows = (dataclasses.replace(plan.rows[0], strategy="diagonal"), *plan.rows[1:])
    with pytest.raises(PlanError, match="'diagonal' is no strategy"):
        plan_for("mlp", dataclasses.replace(plan, rows=rows))


def shard_by(mesh: DeviceMesh, text: str) -> tuple[dict[str, str], str]:
    sharded = autoshard(MODELS["mlp"].make(), mesh, ShardingPlan.from_json(text))
    placements = {name: str(parameter.placements) for name, parameter in sharded.named_parameters()}
    return placements, sharding_plan(sharded).to_json()


def test_a_plan_that_travelled_as_json_shards_the_model(pool: Pool) -> None:
    plan = plan_for("mlp", {"0.*": "colwise", "2.weight": "replicate", "4.*": "colwise"})
    for placements, text in pool.run(shard_by, plan.to_json(), world_size=2, timeout=120):
        shard, replicate = "(Shard(dim=0),)", "(Replicate(),)"
        assert placements == {
            "0.weight": shard,
            "0.bias": shard,
            "2.weight": replicate,
            "4.weight": shard,
            "4.bias": shard,
        }
        assert strategies(ShardingPlan.from_json(text)) == strategies(plan)


# ---------------------------------------------------------------- JSON


@pytest.mark.parametrize("name", MODELS)
def test_json_gives_back_an_equal_plan(name: str) -> None:
    plan = colwise(name)
    again = ShardingPlan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.to_json() == plan.to_json()


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", "7", '{"rows": [{}], "world_size": 2}', '{"rows": 3, "world_size": 2}', '{"rows": []}'],
)
def test_a_text_that_is_no_plan_is_an_error(text: str) -> None:
    with pytest.raises(PlanError, match="the text is no plan"):
        ShardingPlan.from_json(text)


@pytest.mark.parametrize("change", [{"shape": "wide"}, {"parameter": 7}, {"strategy": None}])
def test_a_plan_whose_fields_are_of_another_type_is_an_error(change: dict[str, object]) -> None:
    data = json.loads(plan_for("mlp").to_json())
    data["rows"][0] |= change
    with pytest.raises(PlanError):
        plan_for("mlp", ShardingPlan.from_json(json.dumps(data)))


# ---------------------------------------------------------------- the table


def test_a_plan_prints_every_row_and_note() -> None:
    plan = colwise("tied_head")
    text = str(plan)
    assert text.startswith("Sharding plan over 2 ranks\n")
    for row in plan.rows:
        (line,) = [line for line in text.splitlines() if line.startswith(f"{row.parameter} ")]
        assert " x ".join(map(str, row.shape)) in line
        assert row.strategy in line
    assert "= head.weight" in text
    assert "colwise (dim 0)" in text
    assert all(f"\n* {note}" in str(colwise(name)) for name in ("attention", "hooked") for note in colwise(name).notes)


def test_a_plan_for_one_rank_is_for_1_rank() -> None:
    assert str(plan_for("mlp", world_size=1)).startswith("Sharding plan over 1 rank\n")


def test_a_plan_without_rows_prints() -> None:
    assert str(ShardingPlan((), 2)).startswith("Sharding plan over 2 ranks\n")


def test_a_plan_is_frozen() -> None:
    plan = plan_for("mlp")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.world_size = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.rows[0].strategy = "replicate"  # type: ignore[misc]


def test_a_parameter_without_a_row_is_an_error() -> None:
    plan = plan_for("parameters")
    with pytest.raises(PlanError, match="no row for 'shift'"):
        plan.row("shift")
    assert isinstance(plan.row("layer.weight"), PlanRow)
