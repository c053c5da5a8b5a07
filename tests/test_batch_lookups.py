"""Lookups of tables that are alike are one lookup on stacked rows; no way to change a table leaves the stack behind."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import autoshard, graph_diff, unshard
from passes.errors import AutoshardError, IdRangeError, InputError
from passes.ops.stacked import is_stacked
from tests.compare import Setting, loss_of, require_equal, train_case
from tests.counting import counting_mesh
from tests.models import Model, ids, in_equal_parts
from tests.pool import Pool, RankError


class Alike(nn.Module):
    """Two stacks of bags, one of plain lookups, and one whose ids are the same: ids (B, 5)."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(7 + n, columns, mode="sum") for n in range(3))
        self.means = nn.ModuleList(nn.EmbeddingBag(7 + n, 5) for n in range(2))
        self.plain = nn.ModuleList(nn.Embedding(9 - n, columns) for n in range(3))
        self.wide = nn.ModuleList(nn.EmbeddingBag(7, 1, mode="max") for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        bags = [bag(ids[:, n : 2 * n + 2]) for n, bag in enumerate(self.bags)]  # of 2, 3 and 4 ids
        means = [bag(ids[:, n : n + 3]) for n, bag in enumerate(self.means)]
        plain = [self.plain[0](ids[:, 0]), self.plain[1](ids).sum(1), self.plain[2](ids[:, 1:3]).mean(1)]
        wide = [bag(ids) for bag in self.wide]
        return torch.cat([*bags, *means, *plain, *wide], 1)


class Refused(nn.Module):
    """Tables of one width, each of which has to stay by itself, among three that are looked up together."""

    def __init__(self) -> None:
        super().__init__()
        self.alike = nn.ModuleList(nn.EmbeddingBag(9, 7, mode="sum") for _ in range(3))
        self.padded = nn.EmbeddingBag(9, 7, mode="sum", padding_idx=2)
        self.bounded = nn.EmbeddingBag(9, 7, mode="sum", max_norm=0.5)
        self.counted = nn.Embedding(9, 7, scale_grad_by_freq=True)
        self.frozen = nn.EmbeddingBag(9, 7, mode="sum").requires_grad_(False)
        self.twice = nn.EmbeddingBag(9, 7, mode="sum")
        self.weighted = nn.EmbeddingBag(9, 7, mode="sum")
        self.offsets = nn.EmbeddingBag(9, 7, mode="sum")

    def forward(self, ids: Tensor) -> Tensor:
        weights = ids.double()
        starts = torch.arange(ids.size(0)) * ids.size(1)
        rows = [layer(ids) for layer in (*self.alike, self.padded, self.bounded, self.frozen, self.twice)]
        rows += [self.twice(ids[:, :2]), self.counted(ids[:, 0]), self.weighted(ids, None, weights)]
        return torch.cat([*rows, self.offsets(ids.flatten(), starts)], 1)


class Activated(nn.Module):
    """Results of one stack are changed in place, and kept for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 7) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        first, second, third = (table(ids[:, 0]) for table in self.tables)
        kept = torch.relu_(first) * third
        return kept + torch.relu_(second) * first


class Apart(nn.Module):
    """A result for each table: a loss may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(9, 7, mode="sum") for _ in range(3))
        self.plain = nn.ModuleList(nn.Embedding(9, 7) for _ in range(3))

    def forward(self, ids: Tensor) -> list[Tensor]:
        return [bag(ids) for bag in self.bags] + [table(ids) for table in self.plain]


class Joined(nn.Module):
    """Results of three stacks: side by side between others, stacked behind another, and by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.EmbeddingBag(9, 7, mode="sum") for _ in range(3))
        self.second = nn.ModuleList(nn.EmbeddingBag(9, 7) for _ in range(3))
        self.third = nn.ModuleList(nn.EmbeddingBag(9, 2, mode="sum") for _ in range(2))
        self.head = nn.Linear(7, 1)

    def forward(self, ids: Tensor) -> Tensor:
        first = torch.cat([ids[:, :2], *(bag(ids) for bag in self.first), ids[:, 2:]], 1)
        dense = first[:, 2:9] * 2
        second = torch.stack([dense, *(bag(ids[:, 1:]) for bag in self.second)], dim=-2)
        third = torch.cat([bag(ids) for bag in self.third], dim=1).relu_()
        return torch.cat([first, self.head(second).flatten(1), third], -1)


class NotJoined(nn.Module):
    """Lists that hold the results of a stack, but not all of them once, in order and along the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(9, 7, mode=mode) for mode in ("sum", "mean") for _ in range(3))
        self.more = nn.ModuleList(nn.EmbeddingBag(9, 2, mode=mode) for mode in ("sum", "mean") for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        a, b, c, d, e, f = (table(ids) for table in self.tables)
        g, h, i, j = (table(ids) for table in self.more)
        below, apart = torch.cat([d, e, f], 0), torch.stack([g, h], 2).flatten(1)
        return torch.cat([a, c, b, below.view(3, -1, 7).sum(0), apart, torch.cat([i, j, i], 1)], 1)


_ids = in_equal_parts(lambda rows, seed: (ids(rows, seed, 7, 5),))
CASES = {f"alike{columns}": Model(lambda columns=columns: Alike(columns), _ids) for columns in (7, 2)}  # type: ignore[misc]  # the default argument binds `columns`
CASES |= {"refused": Model(Refused, _ids), "activated": Model(Activated, _ids)}
CASES |= {"joined": Model(Joined, _ids), "not_joined": Model(NotJoined, _ids)}


def differences(mesh: DeviceMesh, settings: list[Setting]) -> list[Any]:
    return [train_case(mesh, CASES[setting.model], setting) for setting in settings]


@pytest.mark.parametrize("world_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))])
def test_stacked_lookups_are_equal_to_the_last_bit(pool: Pool, world_size: int) -> None:
    """Columns that the ranks cannot divide; fewer than ranks."""
    settings = [
        Setting(name, reduction="sum", optimizer=optimizer)
        for name in ("alike7", "alike2")
        for optimizer in ("sgd", "adam")
    ]
    for results in zip(*pool.run(differences, settings, world_size=world_size, timeout=180), strict=True):
        require_equal(list(results), limit=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_exported_lookups_are_stacked_too(pool: Pool, world_size: int) -> None:
    settings = [Setting(name, reduction="sum", examples=True) for name in ("alike7", "alike2")]
    for results in zip(*pool.run(differences, settings, world_size=world_size, timeout=400), strict=True):
        require_equal(list(results), limit=0.0)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_what_is_not_stacked_stays_right(pool: Pool, world_size: int) -> None:
    settings = [Setting("refused"), Setting("activated"), Setting("alike7", optimizer="adam")]
    for results in zip(*pool.run(differences, settings, world_size=world_size, timeout=180), strict=True):
        require_equal(list(results))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_stacked_lookups_compile_to_one_graph(pool: Pool, backend: str) -> None:
    models = ("alike2", "activated") if backend == "aot_eager" else ("alike7",)
    settings = [Setting(name, backend=backend, optimizer="adam") for name in models]
    for results in zip(*pool.run(differences, settings, world_size=3, fresh_dynamo=True, timeout=400), strict=True):
        require_equal(list(results))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("model", ["joined", "not_joined"])
def test_results_that_are_put_side_by_side_compute_the_same(pool: Pool, model: str, world_size: int) -> None:
    settings = [Setting(model, examples=examples, optimizer="adam") for examples in (False, True)]
    for results in zip(*pool.run(differences, settings, world_size=world_size, timeout=180), strict=True):
        require_equal(list(results))


def test_results_that_are_put_side_by_side_compile_to_one_graph(pool: Pool) -> None:
    settings = [Setting("joined", backend="aot_eager")]
    for results in zip(*pool.run(differences, settings, world_size=2, fresh_dynamo=True, timeout=180), strict=True):
        require_equal(list(results))


# ---------------------------------------------------------------- what is one lookup


def graph_of(mesh: DeviceMesh, name: str, examples: bool = False) -> tuple[list[str], str]:
    case = CASES[name]
    diff = graph_diff(autoshard(case.make(), mesh, "paired", example_inputs=case.one_batch() if examples else None))
    return [edit.what for edit in diff.edits if edit.op == "lookup"], "\n".join(diff.regions[0].after)


def test_tables_that_are_alike_are_one_lookup(pool: Pool) -> None:
    for edits, code in pool.run(graph_of, "alike7", world_size=2):
        rows = Counter({"3 lookups in one on 24 stacked rows": 2, "2 lookups in one on 15 stacked rows": 1})
        assert Counter(edits) == rows + Counter(["2 lookups in one on 14 stacked rows"])
        assert code.count("_columns = embedding(") == 1
        assert code.count("_columns = embedding_bag(") == 3


@pytest.mark.parametrize("examples", [False, True])
def test_results_are_put_side_by_side_at_once(pool: Pool, examples: bool) -> None:
    for _, code in pool.run(graph_of, "joined", examples, world_size=2):
        assert (code.count("cat_bags("), code.count("stack_bags("), code.count("results_of_bags(")) == (2, 1, 0)
    for _, code in pool.run(graph_of, "not_joined", examples, world_size=2):
        assert (code.count("cat_bags("), code.count("stack_bags("), code.count("results_of_bags(")) == (0, 0, 4)


def test_tables_with_options_keep_lookups_of_their_own(pool: Pool) -> None:
    for edits, code in pool.run(graph_of, "refused", world_size=2):
        assert edits == ["3 lookups in one on 27 stacked rows"]
        assert code.count("_columns = embedding") == 1 + 8


def collectives_of(mesh: DeviceMesh) -> list[Counter[str]]:
    counted, counter = counting_mesh(mesh)
    model: Any = torch.compile(autoshard(Alike(7), counted, "paired"), backend="aot_eager", fullgraph=True)
    with counter.counting() as forward:
        output = model(ids(4, 0, 7, 5))
    with counter.counting() as backward:
        loss_of(output, 0, 4).backward()
    return [Counter(call.kind for call in calls) for calls in (forward, backward)]


def test_stacks_share_their_collectives(pool: Pool) -> None:
    for forward, backward in pool.run(collectives_of, world_size=2, fresh_dynamo=True, timeout=180):
        assert forward == {"all_gather": 1, "all_to_all": 1}
        assert backward == {"all_to_all": 1}


def out_of_one_table(mesh: DeviceMesh, backend: str | None) -> str:
    """An id that is a row of the last table of the stack, in the bag of the first."""
    model: Any = autoshard(Alike(7), mesh, "paired")
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    batch = torch.zeros(2, 5, dtype=torch.long)
    if mesh.get_local_rank() == 1:
        batch[1, 0] = 8
    try:
        run(batch)
    except IdRangeError as error:
        return str(error)
    except (IndexError, RuntimeError):
        return "refused"
    return "looked up"


def test_an_id_of_another_table_is_an_error_that_names_its_own(pool: Pool) -> None:
    for message in pool.run(out_of_one_table, None, world_size=2):
        assert message.startswith("bags.0: id 8 is out of range; expected ids from 0 to 6")


def test_a_compiled_graph_looks_up_no_row_of_another_table(pool: Pool) -> None:
    assert pool.run(out_of_one_table, "aot_eager", world_size=2, fresh_dynamo=True, timeout=180) == ["refused"] * 2


def without_gradient(mesh: DeviceMesh, used: list[list[int]]) -> tuple[list[bool], list[bool]]:
    """Which parameters have a gradient, sharded and in one process, where a rank's loss is of some results."""
    model, original = autoshard(Apart().double(), mesh, "paired"), Apart().double()
    batch = ids(2, mesh.get_local_rank(), 9, 3)
    outputs, expected = model(batch), original(batch)
    torch.cat([outputs[place].flatten() for place in used[mesh.get_local_rank()]]).sum().backward()
    torch.cat([expected[place].flatten() for rank in used for place in rank]).sum().backward()
    return tuple([p.grad is not None for p in either.parameters()] for either in (model, original))  # type: ignore[return-value]  # of two


@pytest.mark.parametrize("used", [[[0, 4], [0, 4]], [[1, 5], [1, 2, 3]]])
def test_tables_of_a_stack_that_no_loss_depends_on_get_no_gradient(pool: Pool, used: list[list[int]]) -> None:
    for found, expected in pool.run(without_gradient, used, world_size=2):
        assert found == expected
        assert not all(found)


# ---------------------------------------------------------------- no stack is left behind


def _assign(model: nn.Module) -> nn.Module:
    model.load_state_dict({name: value.clone() * 2 for name, value in model.state_dict().items()}, assign=True)
    return model


def _assign_from_outside(model: nn.Module) -> nn.Module:
    outer = nn.ModuleDict({"inner": model})
    outer.load_state_dict({name: value.clone() * 2 for name, value in outer.state_dict().items()}, assign=True)
    return model


def _load(model: nn.Module) -> nn.Module:
    model.load_state_dict({name: value.clone() * 2 for name, value in model.state_dict().items()})
    return model


def _convert(model: nn.Module) -> nn.Module:
    return _load(model.float().double())


def _copy(model: nn.Module) -> nn.Module:
    made = _load(copy.deepcopy(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return made


def _pickle(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    made: nn.Module = torch.load(file, weights_only=False)
    return _load(made)


def _write(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def _replace(model: nn.Module) -> nn.Module:
    for layer in (*model.bags, *model.plain):  # type: ignore[misc, union-attr]  # lists of layers
        layer.weight = nn.Parameter(layer.weight.detach() * 2)
    return _write_others(model)


def _convert_a_part(model: nn.Module) -> nn.Module:
    model.bags.float().double()  # type: ignore[operator, union-attr]  # a list of layers
    return _write(model)


def _write_others(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for layer in (*model.means, *model.wide):  # type: ignore[misc, union-attr]  # as above
            layer.weight.mul_(2)
    return model


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "assign": _assign,
    "assign_from_outside": _assign_from_outside,
    "load": _load,
    "convert": _convert,
    "copy": _copy,
    "pickle": _pickle,
    "write": _write,
    "replace": _replace,
    "convert_a_part": _convert_a_part,
}
UNSEEN = ("replace", "convert_a_part")  # by a compiled lookup on a stack, which refuses to run


def change(mesh: DeviceMesh, names: list[str], backend: str | None) -> dict[str, tuple[bool, bool]]:
    """For each change: the model computes with doubled weights, from the start and after a step; gradients too."""
    found = {}
    rank, world = mesh.get_local_rank(), mesh.size()
    everything = ids(3 * world, 1, 7, 5)
    for name in names:
        original = CASES["alike7"].make()
        model = autoshard(copy.deepcopy(original), mesh, "paired", gradient_reduction="sum")
        compile_ = (lambda m: m) if backend is None else (lambda m: torch.compile(m, backend=backend, fullgraph=True))
        run: Any = compile_(model)
        run(everything.chunk(world)[rank]).sum().backward()
        model = CHANGES[name](model)
        run = compile_(model) if name in ("copy", "pickle") else run
        model.zero_grad()
        with torch.no_grad():
            for parameter in original.parameters():
                parameter.mul_(2)
        if backend is not None and name in UNSEEN:
            with torch.no_grad(), pytest.raises(InputError, match="replaced by others"):
                run(everything.chunk(world)[rank])
            model(everything.chunk(world)[rank])  # in eager mode: stacks again
        optimizers = [torch.optim.SGD(either.parameters(), lr=0.5) for either in (original, model)]
        equal = []
        for _ in range(2):
            output, expected = run(everything.chunk(world)[rank]), original(everything)
            loss_of(output, rank * 3, 3).backward()
            loss_of(expected, 0, 3).backward()
            equal.append(torch.allclose(output, expected.chunk(world)[rank], rtol=1e-12, atol=1e-12))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found[name] = (equal[0], equal[1])
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_change_of_a_table_is_seen_by_the_next_call(pool: Pool, world_size: int) -> None:
    names = list(CHANGES) if world_size == 1 else ["assign", "convert", "copy", "replace"]
    for found in pool.run(change, names, None, world_size=world_size, timeout=180):
        assert found == dict.fromkeys(names, (True, True))


@pytest.mark.parametrize(
    "names",
    [
        ["convert_a_part"],
        # Each is compiled anew, and Dynamo compiles one code eight times at most.
        pytest.param(["assign", "assign_from_outside", "load", "convert"], marks=pytest.mark.slow),
        pytest.param(["copy", "pickle", "write", "replace"], marks=pytest.mark.slow),
    ],
)
def test_every_change_of_a_table_is_seen_by_compiled_code(pool: Pool, names: list[str]) -> None:
    for found in pool.run(change, names, "aot_eager", world_size=1, fresh_dynamo=True, timeout=500):
        assert found == dict.fromkeys(names, (True, True))


def look_outside(mesh: DeviceMesh) -> dict[str, bool]:
    model = autoshard(CASES["alike7"].make(), mesh, "paired")
    batch = ids(3, 0, 7, 5)
    model(batch).sum().backward()
    names = {name for name, _ in CASES["alike7"].make().named_parameters()}
    shards = [bag.weight.to_local() for bag in model.bags]  # type: ignore[union-attr]  # layers
    stack = model._buffers["_autoshard_stack_0"]
    assert stack is not None
    state = model.state_dict()
    storages = [shard.untyped_storage().nbytes() for shard in shards]
    doubled = {name: p.detach() * 2 for name, p in model.named_parameters()}
    called = torch.func.functional_call(model, doubled, (batch,))
    before = model(batch)
    return {
        "names": set(state) == names == set(dict(model.named_parameters())),
        "stacked": is_stacked(stack, [p.to_local() for p in (bag.weight for bag in model.bags)]),  # type: ignore[union-attr]  # layers
        "storages": storages == [shard.numel() * shard.itemsize for shard in shards],
        "state can be copied": all(
            torch.equal(a.to_local(), state[k].to_local()) for k, a in copy.deepcopy(state).items()
        ),
        "functional_call": torch.equal(called, before * 2),
        "unshard": not unshard(model)._buffers and not model._load_state_dict_post_hooks,
    }


def test_the_world_outside_sees_tables_as_they_were(pool: Pool) -> None:
    for found in pool.run(look_outside, world_size=2):
        assert all(found.values()), found


def convert_one(mesh: DeviceMesh) -> None:
    model = autoshard(CASES["alike7"].make(), mesh, "paired")
    model.bags[0].float()  # type: ignore[operator, index, union-attr]  # a list of layers
    model(ids(3, 0, 7, 5))


def test_one_table_of_another_dtype_is_refused(pool: Pool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(convert_one, world_size=2)
    for error in caught.value.exceptions:
        assert isinstance(error, AutoshardError)
        assert "torch.float32 on cpu, torch.float64 on cpu" in str(error)
