"""What bad use gets: an error of ours on every rank, with place, fact, expectation and remedy."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

import autoshard as package
from autoshard import autoshard, verify
from tests.pool import Pool


class Tower(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(10, width)
        self.head = nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids))
        return out


def tower(width: int = 6) -> Tower:
    torch.manual_seed(0)
    return Tower(width)


def unmatched_glob(mesh: DeviceMesh) -> None:
    autoshard(tower(), mesh, {"tabel.*": "colwise"})


def unknown_strategy(mesh: DeviceMesh) -> None:
    autoshard(tower(), mesh, {"table.*": "diagonal"})


def unshardable_name(mesh: DeviceMesh) -> None:
    autoshard(nn.Sequential(tower(), nn.LayerNorm(3)), mesh, {"1.weight": "colwise"})


def unknown_plan(mesh: DeviceMesh) -> None:
    autoshard(tower(), mesh, "fastest")


def two_dimensional_mesh(mesh: DeviceMesh) -> None:
    autoshard(tower(), DeviceMesh("cpu", [[0, 1], [2, 3]]), "colwise")


def descending_mesh(mesh: DeviceMesh) -> None:
    """As on a torch that makes no group in this order."""
    with mock.patch("autoshard.mesh.can_order_groups", lambda: False):
        autoshard(tower(), DeviceMesh("cpu", [3, 2, 1, 0]), "colwise")


def plan_differs(mesh: DeviceMesh) -> None:
    autoshard(tower(), mesh, {"table.*": "replicate" if mesh.get_local_rank() == 1 else "colwise"})


def model_differs(mesh: DeviceMesh) -> None:
    autoshard(tower(width=8 if mesh.get_local_rank() == 1 else 6), mesh, "colwise")


def one_rank_fails(mesh: DeviceMesh) -> None:
    autoshard(tower(), mesh, {"tabel.*": "colwise"} if mesh.get_local_rank() == 1 else "colwise")


def integer_weight(mesh: DeviceMesh) -> None:
    model = tower()
    model.table.weight = nn.Parameter(torch.zeros(10, 6, dtype=torch.int32), requires_grad=False)
    autoshard(model, mesh, "colwise")


def wrapped(mesh: DeviceMesh) -> None:
    autoshard(nn.parallel.DistributedDataParallel(tower(), process_group=mesh.get_group()), mesh, "colwise")


def sharded_twice(mesh: DeviceMesh) -> None:
    autoshard(autoshard(tower(), mesh, "colwise"), mesh)


def has_gradient(mesh: DeviceMesh) -> None:
    model = tower()
    model(torch.arange(3)).sum().backward()
    autoshard(model, mesh, "colwise")


def has_hook(mesh: DeviceMesh) -> None:
    model = tower()
    model.table.weight.register_hook(lambda gradient: gradient)
    autoshard(model, mesh, "colwise")


def no_module(mesh: DeviceMesh) -> None:
    autoshard(torch.sin, mesh, "colwise")  # type: ignore[type-var]  # on purpose


def other_placement(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Shard

    autoshard(tower(), mesh, "colwise", input_placement=Shard(1))


def other_reduction(mesh: DeviceMesh) -> None:
    autoshard(tower(), mesh, "colwise", gradient_reduction="max")


def other_exchange_dtype(mesh: DeviceMesh) -> None:
    autoshard(tower(), mesh, "colwise", exchange_dtype=(torch.bfloat16, torch.int8))


def three_exchange_dtypes(mesh: DeviceMesh) -> None:
    autoshard(tower(), mesh, "colwise", exchange_dtype=(None, None, None))  # type: ignore[arg-type]  # on purpose


def id_out_of_range(mesh: DeviceMesh) -> None:
    model = autoshard(tower(), mesh, "colwise")
    model(torch.tensor([1, 10 if mesh.get_local_rank() == 1 else 9, 3]))


def negative_id(mesh: DeviceMesh) -> None:
    model = autoshard(tower(), mesh, "colwise")
    model(torch.tensor([1, -1 if mesh.get_local_rank() == 0 else 9, 3]))


def sizes_differ(mesh: DeviceMesh) -> None:
    model = autoshard(tower(), mesh, "colwise")
    model(torch.arange(3 + mesh.get_local_rank()))


def replicated_sizes_differ(mesh: DeviceMesh) -> None:
    model = autoshard(tower(), mesh, "colwise", input_placement=Replicate())
    model(torch.arange(3 + mesh.get_local_rank()))


def float_ids(mesh: DeviceMesh) -> None:
    autoshard(tower(), mesh, "colwise")(torch.ones(3))


def dtypes_differ(mesh: DeviceMesh) -> None:
    ids = torch.arange(3)
    autoshard(tower(), mesh, "colwise")(ids.double() if mesh.get_local_rank() == 1 else ids)


def old_optimizer(mesh: DeviceMesh) -> None:
    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autoshard(model, mesh, "colwise")
    optimizer.step()


def offsets_do_not_ascend(mesh: DeviceMesh) -> None:
    bag = autoshard(nn.EmbeddingBag(10, 6), mesh, "colwise")
    bag(torch.arange(4), torch.tensor([0, 3, 1] if mesh.get_local_rank() == 1 else [0, 1, 3]))


def offsets_overrun(mesh: DeviceMesh) -> None:
    bag = autoshard(nn.EmbeddingBag(10, 6), mesh, "colwise", ragged=True)
    bag(torch.arange(4), torch.tensor([0, 5] if mesh.get_local_rank() == 1 else [0, 1]))


def unsuitable_examples(mesh: DeviceMesh) -> None:
    autoshard(tower(), mesh, "colwise", example_inputs=(torch.arange(3), torch.arange(3)))


def no_sharded_model(mesh: DeviceMesh) -> None:
    package.graph_diff(tower())


CASES: list[tuple[Callable[[DeviceMesh], None], type[Exception], str]] = [
    (unmatched_glob, package.PlanError, r"'tabel\.\*'.*matches no parameter.*table\.weight.*Correct the name"),
    (unknown_strategy, package.PlanError, r"'diagonal' is no strategy; expected one of colwise, rowwise, replicate"),
    (unshardable_name, package.PlanError, r"'1\.weight'.*cannot be sharded"),
    (unknown_plan, package.PlanError, r"'fastest' is no strategy"),
    (plan_differs, package.AgreementError, r"ranks differ: rank 0 .*, rank 1 .*same plan on every rank"),
    (model_differs, package.AgreementError, r"ranks differ: rank 0 .*, rank 1 "),
    (one_rank_fails, package.PlanError, r"rank 1 of the mesh: plan entry 'tabel"),
    (integer_weight, package.PlanError, r"table\.weight.*torch\.int32; expected a floating point weight"),
    (wrapped, package.CaptureError, r"DistributedDataParallel.*\.module"),
    (sharded_twice, package.CaptureError, r"sharded already"),
    (has_gradient, package.CaptureError, r"table\.weight: it has a gradient.*zero_grad"),
    (has_hook, package.CaptureError, r"table\.weight: it has a hook.*after autoshard"),
    (no_module, package.CaptureError, r"expected an nn\.Module"),
    (other_placement, package.PlanError, r"input_placement.*expected Shard\(0\) or Replicate\(\)"),
    (other_reduction, package.PlanError, r"gradient_reduction: got 'max'"),
    (other_exchange_dtype, package.PlanError, r"exchange_dtype: got .*int8.*expected torch.bfloat16, torch.float16"),
    (three_exchange_dtypes, package.PlanError, r"exchange_dtype: got \(None, None, None\)"),
    (id_out_of_range, package.IdRangeError, r"table: id 10 is out of range; expected ids from 0 to 9"),
    (negative_id, package.IdRangeError, r"table: id -1 is out of range; expected ids from 0 to 9"),
    (sizes_differ, package.InputError, r"table: .*rank 0: \(3,\), rank 1: \(4,\).*ragged=True"),
    (replicated_sizes_differ, package.InputError, r"table: .*differs between the ranks"),
    (float_ids, package.InputError, r"table: the ids are of torch\.float32; expected torch\.int32 or torch\.int64"),
    (dtypes_differ, package.InputError, r"table: .*dtype of the input differs.*rank 1: torch\.float64"),
    (old_optimizer, package.ConsumedError, r"before autoshard\(\).*Build optimizers"),
    (offsets_do_not_ascend, package.InputError, r"rank 1: the offsets do not ascend"),
    (offsets_overrun, package.InputError, r"rank 1: the last offset is 5, with 4 ids"),
    (unsuitable_examples, package.CaptureError, r"example_inputs: Tower\.forward does not take 2 arguments"),
    (no_sharded_model, package.AutoshardError, r"no sharded model.*autoshard\(model\) first"),
]


@pytest.mark.parametrize(("use", "error", "match"), CASES, ids=[case[0].__name__ for case in CASES])
def test_bad_use_is_told_on_every_rank(
    pool: Pool, use: Callable[[DeviceMesh], None], error: type[Exception], match: str
) -> None:
    text = pool.expect_same_error(use, error=error, match=match, world_size=2)
    assert issubclass(error, package.AutoshardError)
    assert "expected" in text


def test_a_mesh_of_two_dimensions_is_refused(pool: Pool) -> None:
    pool.expect_same_error(
        two_dimensional_mesh, error=package.MeshError, match=r"2 dimensions; expected a 1-D mesh", world_size=4
    )


def test_a_mesh_whose_order_torch_cannot_give_to_a_group_is_refused(pool: Pool) -> None:
    pool.expect_same_error(
        descending_mesh, error=package.MeshError, match=r"\[3, 2, 1, 0\] are not ascending.*expected ascending ranks"
    )


def test_without_a_process_group_the_remedy_is_named() -> None:
    with pytest.raises(package.MeshError, match="init_process_group"):
        autoshard(tower())


class RankDependent(Tower):
    """Computes something else once it is sharded: its table is a DTensor then."""

    def forward(self, ids: Tensor) -> Tensor:
        if type(self.table.weight) is not nn.Parameter:
            return super().forward(ids) * 2
        return super().forward(ids)


def batch(seed: int) -> Tensor:
    return torch.randint(0, 10, (4,), generator=torch.Generator().manual_seed(seed))


def test_verify_names_what_differs_and_by_how_much() -> None:
    with pytest.raises(
        package.EquivalenceError, match=r"tensors differ, first output 0 of rank 0 by 1\.00e\+00 in step 0"
    ):
        verify(RankDependent, batch, compile=False)


@pytest.mark.slow
def test_verify_passes_where_nothing_differs() -> None:
    certificate = verify(tower, batch, compile="aot_eager")
    assert certificate.graphs == 1
    assert certificate.graph_breaks == 0
    assert {c.what for c in certificate.comparisons} == {"output", "gradient", "parameter"}
    assert max(c.difference for c in certificate.comparisons) <= 1e-12
    assert "Equal on 2 ranks" in str(certificate)
