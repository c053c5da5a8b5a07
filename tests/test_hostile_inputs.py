"""Inputs that no model should get: ours is an error on every rank, or what torch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard import AutoshardError, IdRangeError, InputError, autoshard
from autoshard.api import Settings, prepare
from passes.rewrite.owned import _wire
from tests.pool import Pool

ROWS, COLUMNS = 10, 6
NONE = torch.tensor([], dtype=torch.long)
Args = tuple[Any, ...]


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


def embedding(**options: Any) -> nn.Module:
    return nn.Embedding(ROWS, COLUMNS, **options)


def bag(**options: Any) -> nn.Module:
    return nn.EmbeddingBag(ROWS, COLUMNS, **options)


def linear() -> nn.Module:
    return nn.Linear(4, COLUMNS)


@dataclass(frozen=True)
class Use:
    """A layer, and what two ranks call it with.

    match: in the error; `at` is the module's path. For an error of torch, nothing.
    how: "equal" or "ragged" batches, or "replicated" ones.
    """

    layer: Callable[[], nn.Module]
    first: Args
    second: Args
    error: type[Exception]
    match: str = ""
    how: str = "equal"


def sums(**options: Any) -> nn.Module:
    return bag(mode="sum", **options)


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(*shape, **options)


FOUR, OFFSETS = torch.arange(4), ids(0, 2)
WRONG_OFFSETS = {"first": ids(1, 2), "descending": ids(0, 3, 1), "negative": ids(0, -3), "beyond": ids(0, 5)}
_FACTS = {
    "first": "the first offset is 1",
    "descending": "the offsets do not ascend",
    "negative": "the offsets do not ascend",
    "beyond": "the last offset is 5, with 4 ids",
}
_RIGHT = ids(0, 1, 2)

OURS: dict[str, Use] = {
    **{
        f"id {bad} {kind} {how}": Use(
            layer,
            (ids(1, 2),),
            (ids(1, bad),),
            IdRangeError,
            rf"1: id {bad} is out of range; expected ids from 0 to 9.*Map unknown ids",
            how,
        )
        for bad in (ROWS, -1)
        for how in ("equal", "ragged", "replicated")
        for kind, layer in {
            "embedding": embedding,
            "max_norm": lambda: embedding(max_norm=0.5),
        }.items()
    },
    **{
        f"id 10 in a bag {how}": Use(bag, (FOUR, OFFSETS), (FOUR + 7, OFFSETS), IdRangeError, "id 10 is out", how)
        for how in ("equal", "ragged", "replicated")
    },
    "id in an empty table": Use(
        lambda: nn.Embedding(0, COLUMNS), (ids(0),), (ids(0),), IdRangeError, "id 0 is out.*the table has no rows"
    ),
    "float ids": Use(bag, (ones(2, 2),), (ones(2, 2),), InputError, "the ids are of torch.float32"),
    "float ids replicated": Use(
        embedding, (ones(2, 2),), (ones(2, 2),), InputError, "the ids are of torch.float32", "replicated"
    ),
    "float ids max_norm": Use(
        lambda: embedding(max_norm=0.5), (ones(2, 2),), (ones(2, 2),), InputError, "the ids are of torch.float32"
    ),
    "bool ids": Use(embedding, (ones(2) > 0,), (ones(2) > 0,), InputError, "the ids are of torch.bool"),
    **{
        f"offsets {what} {how}": Use(
            bag, (FOUR, _RIGHT[: len(wrong)]), (FOUR, wrong), InputError, f"1, rank 1: {_FACTS[what]}", how
        )
        for how in ("equal", "ragged", "replicated")
        for what, wrong in WRONG_OFFSETS.items()
    },
    "float offsets": Use(bag, (FOUR, ones(2)), (FOUR, ones(2)), InputError, "offsets are of torch.float32"),
    "2-D offsets": Use(
        bag, (FOUR, OFFSETS.view(1, 2)), (FOUR, OFFSETS.view(1, 2)), InputError, r"offsets are of .* shape \(1, 2\)"
    ),
    "offsets on one rank": Use(
        bag, (FOUR.view(2, 2), OFFSETS), (FOUR.view(2, 2),), InputError, r"offsets is given on ranks \[0\] only"
    ),
    "offsets of two dtypes": Use(
        bag, (FOUR, OFFSETS), (FOUR, OFFSETS.int()), InputError, "the dtype of offsets differs", "ragged"
    ),
    **{
        f"no offset {how}": Use(
            lambda: bag(include_last_offset=True),
            (FOUR, NONE if how == "equal" else ids(0, 4)),
            (FOUR, NONE),
            InputError,
            f"1, rank {0 if how == 'equal' else 1}: there is no offset; expected at least one",
            how,
        )
        for how in ("equal", "ragged")
    },
    **{
        f"weights {what} {how}": Use(sums, (FOUR, OFFSETS, first), (FOUR, OFFSETS, second), InputError, match, how)
        for how in ("equal", "ragged")
        for what, first, second, match in (
            ("on one rank", None, ones(4), r"per_sample_weights is given on ranks \[1\] only"),
            ("of two dtypes", ones(4), ones(4).double(), "the dtype of per_sample_weights differs"),
            ("too few", ones(3), ones(3), r"rank 0: per_sample_weights have the shape \(3,\), ids \(4,\)"),
            ("with a gradient on one rank", ones(4, requires_grad=True), ones(4), r"gradient on ranks \[0\] only"),
        )
    },
    "weights too few on one rank": Use(
        sums, (FOUR, OFFSETS, ones(4)), (FOUR, OFFSETS, ones(3)), InputError, "rank 1: per_sample_weights", "ragged"
    ),
    "weights too many and too few": Use(
        sums, (FOUR, OFFSETS, ones(3)), (FOUR[:3], OFFSETS, ones(4)), InputError, "rank 0: per_sample_weights", "ragged"
    ),
    "weights of another rank": Use(
        sums, (FOUR.view(2, 2), None, ones(4)), (FOUR.view(2, 2), None, ones(4)), InputError, "rank 0: per_sample_w"
    ),
    **{
        f"nested {kind} {how}": Use(layer, (nested,), (nested,), InputError, r"nested or sparse.*ranks \[0, 1\]", how)
        for how in ("equal", "ragged", "replicated")
        for kind, layer, nested in (
            ("ids", embedding, torch.nested.nested_tensor([ids(1, 2), ids(3)], layout=torch.jagged)),
            ("bags", bag, torch.nested.nested_tensor([ids(1, 2), ids(3)], layout=torch.jagged)),
            ("lists", bag, torch.nested.nested_tensor([ids(1, 2), ids(3)])),
        )
    },
    "sparse ids on one rank": Use(
        embedding, (ids(1, 2).to_sparse(),), (ids(1, 2),), InputError, r"nested or sparse tensor on ranks \[0\]"
    ),
    "lengths of two ranks": Use(
        embedding, (FOUR.view(2, 2),), (FOUR.view(1, 4),), InputError, r"beyond dimension 0.*same way", "ragged"
    ),
    "dimensions of two ranks": Use(
        embedding, (FOUR.view(1, 1, 1, 1, 1, 1, 1, 2, 2),), (FOUR,), InputError, r"rank 1: \(4,\)"
    ),
    "features of two dtypes": Use(linear, (ones(2, 4),), (ones(2, 4).double(),), InputError, "the dtype of the input"),
    "features with a gradient on one rank": Use(
        linear, (ones(2, 4, requires_grad=True),), (ones(2, 4),), InputError, r"gradient on ranks \[0\] only"
    ),
}


def autosharded(layer: nn.Module, mesh: DeviceMesh, how: str) -> nn.Module:
    """In a module, so that the errors have a path to name."""
    placement = Replicate() if how == "replicated" else Shard(0)
    return autoshard(_Named(layer), mesh, "colwise", input_placement=placement, ragged=how == "ragged")


class _Named(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.add_module("1", layer)

    def forward(self, *args: Any) -> Any:
        return self.get_submodule("1")(*args)


def call(mesh: DeviceMesh, name: str, register: str = "ours") -> Tensor:
    """The model's output on this rank's arguments. Before an error, the weight is not touched."""
    use = (OURS if register == "ours" else TORCHS)[name]
    torch.manual_seed(0)
    model = autosharded(use.layer(), mesh, use.how)
    weight = model.get_parameter("1.weight")
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    before = local.detach().clone()
    try:
        out: Tensor = model(*(use.first, use.second)[mesh.get_local_rank()])
    except Exception:
        assert torch.equal(local, before), "the weight was changed before the error"
        raise
    return out.detach()


@pytest.mark.parametrize("name", OURS)
def test_a_bad_input_of_one_rank_is_our_error_on_all(pool: Pool, name: str) -> None:
    use = OURS[name]
    text = pool.expect_same_error(call, name, error=use.error, match=use.match, world_size=2)
    assert issubclass(use.error, AutoshardError)
    assert text.startswith("1") and "expected" in text


# ---------------------------------------------------------------- as torch does

TORCHS: dict[str, Use] = {
    "weights of another dtype": Use(
        sums, *([(FOUR, OFFSETS, ones(4).double())] * 2), RuntimeError, "per_sample_weights"
    ),
    **{
        f"weights with {mode}": Use(
            lambda mode=mode: bag(mode=mode), *([(FOUR, OFFSETS, ones(4))] * 2), NotImplementedError, "mode='sum'"
        )
        for mode in ("mean", "max")
    },
    **{
        f"ids of {dims} dimensions {how}": Use(
            bag, *([(torch.zeros([1] * dims, dtype=torch.long),)] * 2), ValueError, match, how
        )
        for how in ("equal", "ragged", "replicated")
        for dims, match in ((1, "offsets has to be a 1D Tensor"), (3, "1D or 2D Tensor"))
    },
    **{
        f"max with {option}": Use(
            lambda option=option: bag(mode="max", **{option: True}),
            *([(FOUR, OFFSETS)] * 2),
            ValueError,
            "max mode does not support",
        )
        for option in ("sparse", "scale_grad_by_freq")
    },
    "2-D ids with offsets": Use(bag, *([(FOUR.view(2, 2), OFFSETS)] * 2), ValueError, "input is 2D"),
    "features of another dtype": Use(linear, *([(ones(2, 4).double(),)] * 2), RuntimeError, "dtype"),
    "features of another width": Use(linear, *([(ones(2, 5),)] * 2), RuntimeError, "shapes cannot be multiplied"),
}


@pytest.mark.parametrize("name", TORCHS)
def test_what_torch_refuses_is_its_error_on_all_ranks(pool: Pool, name: str) -> None:
    use = TORCHS[name]
    with pytest.raises(use.error, match=use.match):
        use.layer()(*use.first)
    pool.expect_same_error(call, name, "torch's", error=use.error, match=use.match, world_size=2)


def sparse_frequencies(mesh: DeviceMesh | None) -> None:
    layer = embedding(sparse=True, scale_grad_by_freq=True)
    out: Tensor = (layer if mesh is None else autoshard(layer, mesh, "colwise"))(FOUR)
    out.sum().backward()


def test_sparse_gradients_by_frequency_are_torchs_error_on_all_ranks(pool: Pool) -> None:
    match = "scale_grad_by_freq not supported with sparse gradients"
    with pytest.raises(RuntimeError, match=match):
        sparse_frequencies(None)
    pool.expect_same_error(sparse_frequencies, error=RuntimeError, match=match, world_size=2)


def look_up_compiled(mesh: DeviceMesh, bad: int, bags: bool) -> None:
    model = torch.compile(autoshard(sums() if bags else embedding(), mesh, "colwise"), backend="aot_eager")
    model(torch.full((2, 3), bad if mesh.get_local_rank() == 1 else 0))


@pytest.mark.parametrize(
    ("bags", "error", "match"), [(False, IndexError, "out of range"), (True, RuntimeError, "not in the valid range")]
)
def test_a_bad_id_in_a_compiled_model_is_torchs_error_on_all_ranks(
    pool: Pool, bags: bool, error: type[Exception], match: str
) -> None:
    for bad in (ROWS, -1):
        pool.expect_same_error(look_up_compiled, bad, bags, error=error, match=match, world_size=2, fresh_dynamo=True)


def results(mesh: DeviceMesh, how: str, mode: str, first: Args, second: Args) -> Tensor:
    torch.manual_seed(0)
    model = autosharded(bag(mode=mode), mesh, how)
    out: Tensor = model(*(first, second)[mesh.get_local_rank()])
    out.sum().backward()
    return out.detach()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_ids_of_a_rank_without_bags_are_left_out(pool: Pool, mode: str) -> None:
    """As torch does for sums; its other modes crash on them."""
    none: Args = (FOUR, NONE)
    for how in ("equal", "ragged", "replicated"):
        for out in pool.run(results, how, mode, none, none, world_size=2):
            assert out.shape == (0, COLUMNS)
    torch.manual_seed(0)
    expected = bag(mode=mode)(FOUR, OFFSETS)
    empty, full = pool.run(results, "ragged", mode, none, (FOUR, OFFSETS), world_size=2)
    assert empty.shape == (0, COLUMNS)
    assert torch.equal(full, expected)


def odd_numbers(mesh: DeviceMesh, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's output and its columns of the weight after it, and those of one process."""
    world, rank = mesh.size(), mesh.get_local_rank()
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {
        "embedding": embedding(),
        "max_norm": embedding(max_norm=1.0),
        "max_norm inf": embedding(max_norm=1.0, norm_type=float("inf")),
        "sum": sums(),
        "mean": bag(mode="mean"),
        "max": bag(mode="max"),
        "linear": nn.Linear(ROWS, COLUMNS),
    }
    layer = layers[kind]
    with torch.no_grad():
        for place, value in ((1, torch.nan), (7, torch.inf), (23, -torch.inf), (37, torch.nan)):
            layer.get_parameter("weight").view(-1)[place] = value
    batch = torch.arange(4 * world).view(-1, 4).repeat(2, 1) % ROWS
    everything = F.one_hot(batch.sum(1) % ROWS, ROWS).float() if kind == "linear" else batch
    original = copy.deepcopy(layer)
    out = autoshard(layer, mesh, "colwise")(everything.chunk(world)[rank])
    expected = original(everything).chunk(world)[rank]
    weight = layer.get_parameter("weight")
    assert isinstance(weight, DTensor)
    whole = original.get_parameter("weight")
    columns = whole.chunk(world, 0 if kind == "linear" else 1)[rank]
    return out.detach(), weight.to_local().detach(), expected.detach(), columns.detach()


@pytest.mark.parametrize("kind", ["embedding", "max_norm", "max_norm inf", "sum", "mean", "max", "linear"])
def test_nan_and_infinite_weights_stay_what_they_are(pool: Pool, kind: str) -> None:
    for out, columns, expected, expected_columns in pool.run(odd_numbers, kind, world_size=3):
        assert out.isnan().any() or kind == "max"
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(columns, expected_columns, rtol=1e-6, atol=1e-6, equal_nan=True)


def empty_table(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    found = []
    for layer, args in (
        (nn.Embedding(0, COLUMNS), (NONE,)),
        (nn.EmbeddingBag(0, COLUMNS, mode="sum"), (NONE, ids(0, 0, 0))),
    ):
        model = autoshard(layer, mesh, "colwise")
        out = model(*args)
        out.sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        found += [tuple(out.shape), tuple(model.get_parameter("weight").shape)]
    return found


def test_a_table_without_rows_has_results_without_ids(pool: Pool) -> None:
    assert pool.run(empty_table, world_size=2) == [[(0, COLUMNS), (0, COLUMNS), (3, COLUMNS), (0, COLUMNS)]] * 2


@pytest.mark.parametrize("rows", [2**31 - 1, 2**31, 2**40])
def test_a_table_of_billions_of_rows_has_a_plan_and_a_graph(rows: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.EmbeddingBag(rows, 8, mode="sum", max_norm=1.0), nn.Linear(8, 3))
    prepared = prepare(model, "paired", None, Settings("none", 4, Shard(0), "mean", False))
    row = prepared.plan.row("0.weight")
    assert (row.strategy, row.shape, row.sizes(4)) == ("colwise", (rows, 8), [2, 2, 2, 2])
    assert f"weight ({rows}, 8) -> ({rows}, 2) per rank" in str(prepared.diff.edits[0].shapes)
    assert model[0].weight.shape == (rows, 8)
    wire = torch.int32 if rows < 2**31 else torch.int64
    assert _wire(nn.Parameter(model[0].weight)) == (torch.float32, wire)
