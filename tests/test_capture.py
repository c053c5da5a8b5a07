"""Capture, by tracing and by torch.export: every layer is reached, and the graphs compute what the model computed."""

from __future__ import annotations

import copy
import gc
import linecache
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import autoshard, unshard
from autoshard.capture import Capture, capture
from autoshard.export import capture_export
from autoshard.forwards import use_graph
from autoshard.planner import make_plan
from passes.errors import InputError
from passes.pipeline import normalize
from passes.sites import find_sites
from tests.captures import LADDERS, by_ladder, captured, captured_once, exported
from tests.compare import Setting, loss_of, require_equal, tensors, train_both
from tests.models import MODELS, ODD, AttributeWriter, Factor, Hooked, Model, dense, layers, relative
from tests.pool import Pool


def with_graphs(model: nn.Module, ladder: str, case: Model) -> nn.Module:
    """A copy of the model that runs by its captured graphs, in this process, nothing sharded."""
    model = copy.deepcopy(model)
    return run_by_graphs(model, captured(model, ladder, case))


def run_by_graphs(model: nn.Module, found: Capture) -> nn.Module:
    graphs: dict[int, dict[bool | None, Any]] = {}
    for region in found.regions:
        normalize(region.graph)
        graphs.setdefault(id(region.module), {})[region.mode] = region.graph
    for module in list(model.modules()):
        if id(module) in graphs:
            use_graph(module, graphs[id(module)], found.mode_sensitive if module is model else ())
    return model


def difference(one: nn.Module, other: nn.Module, args: tuple[Any, ...]) -> float:
    """The largest relative difference in outputs and gradients, with the same random numbers."""
    found = []
    results = []
    for model in (one, other):
        torch.manual_seed(5)
        model.zero_grad()
        outputs = model(*args)
        loss_of(outputs, 0, 1).backward()
        results.append([t.detach() for t in tensors(outputs)])
    found += [relative(a, b) for a, b in zip(*results, strict=True)]
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        if a.grad is not None or b.grad is not None:
            zero = torch.zeros_like(a)
            found.append(relative(zero if a.grad is None else a.grad, zero if b.grad is None else b.grad))
    found += [relative(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=False)]
    return max(found)


def attributes(module: nn.Module) -> dict[str, object]:
    """All that a module holds, its parameters, buffers and children one by one."""
    stores = (module._parameters, module._buffers, module._modules)
    inside = {f"{number}.{name}": value for number, store in enumerate(stores) for name, value in store.items()}
    return {**vars(module), **inside}


def same(one: object, other: object) -> bool:
    """One object; or, as torch.export makes some containers anew, an equal value that is no tensor."""
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other)


# ---------------------------------------------------------------- every layer is reached


@pytest.mark.parametrize(("name", "ladder"), by_ladder(*MODELS))
def test_every_layer_is_in_a_graph_or_kept_with_a_reason(name: str, ladder: str) -> None:
    model, found = captured_once(name, ladder)
    used = {
        id(model.get_parameter(site.weight))
        for region in found.regions
        for site in find_sites(region.graph, region.path)
    }
    for path, layer in layers(model).items():
        assert id(layer.weight) in used or found.kept.get(path), path


@pytest.mark.parametrize(("name", "ladder"), by_ladder(*MODELS))
def test_every_layer_is_reached_by_itself_too(name: str, ladder: str) -> None:
    """Code outside of a graph may call a layer, so each has a region of its own."""
    model, found = captured_once(name, ladder)
    alone = {id(region.module) for region in found.regions}
    assert {path for path, layer in layers(model).items() if id(layer) not in alone} <= found.kept.keys()


@pytest.mark.parametrize("name", [name for name, case in MODELS.items() if case.whole])
def test_a_model_that_can_be_traced_is_one_graph(name: str) -> None:
    _, found = captured_once(name, "fx")
    assert [region.path for region in found.regions if not region.is_layer] == [""]
    assert found.kept == {}


@pytest.mark.parametrize(("name", "ladder"), exported(*(name for name, case in MODELS.items() if case.exports)))
def test_a_model_that_can_be_exported_is_one_graph_for_each_mode(name: str, ladder: str) -> None:
    _, found = captured_once(name, ladder)
    whole = [region for region in found.regions if not region.is_layer]
    assert {region.path for region in whole} == {""}
    assert {region.mode for region in whole} in ({None}, {True, False})


@pytest.mark.parametrize(
    ("name", "path", "reason"),
    [
        ("optional_mask", "", "mask is not None"),
        ("mode_branch", "", "self.training"),
        ("dropout", "", "self.training"),
        ("attribute_writer", "", "self.calls += 1"),
        ("custom_gradient", "", "autograd.Function"),
        ("no_grad", "", "changes a mode of torch"),
        ("non_tensor_arguments", "", "control flow"),
        ("attention", "attention", "control flow"),
    ],
)
def test_a_module_that_a_trace_would_get_wrong_is_kept_with_the_reason(name: str, path: str, reason: str) -> None:
    _, found = captured_once(name, "fx")
    assert reason in found.kept[path]
    assert path not in {region.path for region in found.regions}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("optional_mask", "if mask is not None:"),
        ("attribute_writer", "self.calls += 1"),
        ("mode_branch", "self.training"),
    ],
)
def test_a_reason_names_the_line_of_the_code(name: str, line: str) -> None:
    file, number, _ = capture(MODELS[name].make()).kept[""].split(":", 2)
    assert line in open(file).readlines()[int(number) - 1]


class Borrowing(nn.Module):
    """Calls a function of some library on its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.function(x))
        return out


@pytest.mark.parametrize("library", ["torchother", "numpyother"])
def test_a_library_with_a_name_that_begins_like_that_of_torch_is_read_too(library: str) -> None:
    source = "def prepare(x):\n    return 0 if x is None else x\n"
    file = str(Path(torch.__file__).parent.parent / library / "prepare.py")
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {}
    exec(compile(source, file, "exec"), namespace)
    found = capture(Borrowing(namespace["prepare"]))
    assert found.kept[""] == f"{file}:2: asks `x is None` of a value"


def test_a_model_that_export_refuses_goes_down_the_ladder_with_a_note() -> None:
    case = MODELS["hooked"]
    found = captured(case.make(), "export", case)
    assert "first has hooks" in found.notes[0]
    assert {region.path for region in found.regions} == {region.path for region in capture(case.make()).regions}


def test_notes_of_the_ladder_stand_in_the_plan() -> None:
    case = MODELS["hooked"]
    model = case.make()
    found = captured(model, "export", case)
    plan = make_plan(model, found, "colwise", 2)
    assert any("first has hooks" in note for note in plan.notes)


@pytest.mark.parametrize(("name", "ladder"), by_ladder(*ODD))
def test_capturing_changes_no_model(name: str, ladder: str) -> None:
    case = MODELS[name]
    model = case.make()
    before = {path: (type(module), attributes(module)) for path, module in model.named_modules()}
    values = {key: value.clone() for key, value in model.state_dict().items()}
    captured(model, ladder, case)
    after = {path: (type(module), attributes(module)) for path, module in model.named_modules()}
    assert after.keys() == before.keys()
    for path, (kind, facts) in before.items():
        assert after[path][0] is kind
        assert after[path][1].keys() == facts.keys()
        assert [key for key, fact in facts.items() if not same(after[path][1][key], fact)] == [], path
    assert all(torch.equal(values[key], value) for key, value in model.state_dict().items())


# ---------------------------------------------------------------- graphs compute what the model computed


IN_BOTH_MODES = [
    (name, captured_in_training)
    for name, case in MODELS.items()
    for captured_in_training in ([True, False] if case.modes else [True])
]


@pytest.mark.parametrize(("name", "captured_in_training", "ladder"), by_ladder(*IN_BOTH_MODES))
def test_graphs_compute_what_the_model_computes_in_both_modes_and_every_batch_size(
    name: str, captured_in_training: bool, ladder: str
) -> None:
    case = MODELS[name]
    original = case.make().train(captured_in_training)
    if captured_in_training:
        model = run_by_graphs(*copy.deepcopy(captured_once(name, ladder)))
    else:
        model = with_graphs(original, ladder, case)
    for training, sizes in ((True, (5,)), (False, (1, 2, 5, 7))):
        original.train(training)
        model.train(training)
        for rows in sizes:
            assert difference(original, model, case.one_batch(rows, 3)) <= 1e-13, (training, rows)


def test_sizes_that_are_equal_in_the_examples_only_may_differ_later() -> None:
    case = MODELS["offset_bag"]
    original = case.make()
    model = copy.deepcopy(original)
    four_bags_of_four_ids = (torch.tensor([3, 1, 4, 1]), torch.tensor([0, 1, 2, 4]))
    (region, *_) = capture_export(model, four_bags_of_four_ids).regions
    use_graph(model, {region.mode: region.graph})
    assert difference(original, model, (torch.tensor([3, 1, 4, 1, 5, 9, 2]), torch.tensor([0, 1, 5]))) == 0


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 2 if self.training else self.layer(x)


@pytest.mark.parametrize("ladder", LADDERS)
def test_a_part_in_evaluation_mode_at_capture_stays_in_it(ladder: str) -> None:
    torch.manual_seed(1)
    original = nn.Sequential(Part(), Part()).double()
    original[0].eval()
    case = Model(lambda: original, MODELS["optional_mask"].split)
    model = with_graphs(original, ladder, case)
    assert difference(original, model, case.one_batch()) <= 1e-13


def in_mixed_modes(original: nn.Module, ladder: str, case: Model, frozen: str) -> tuple[nn.Module, nn.Module]:
    """The original and its captured copy, put in training after capture, but for one part."""
    model = with_graphs(original, ladder, case)
    for either in (original, model):
        either.train()
        either.get_submodule(frozen).eval()
    return original, model


def test_a_traced_batch_norm_may_be_frozen_after_capture() -> None:
    case = MODELS["batch_norm"]
    assert difference(*in_mixed_modes(case.make(), "fx", case, "norm"), case.one_batch(5, 3)) <= 1e-13


def test_an_exported_batch_norm_that_is_frozen_after_capture_is_an_error() -> None:
    case = MODELS["batch_norm"]
    _, model = in_mixed_modes(case.make(), "export", case, "norm")
    with pytest.raises(
        InputError, match="norm: it is in evaluation mode, the model in training mode; expected one mode"
    ):
        model(*case.one_batch(5, 3))


@pytest.mark.parametrize("ladder", LADDERS)
def test_a_part_that_is_frozen_after_capture_is_never_silently_trained(ladder: str) -> None:
    """A part of a person's own, which asks for its mode."""
    torch.manual_seed(1)
    original = nn.Sequential(Part(), Part()).double()
    case = Model(lambda: original, MODELS["optional_mask"].split)
    original, model = in_mixed_modes(original, ladder, case, "0")
    try:
        found = difference(original, model, case.one_batch())
    except InputError:
        return
    assert found <= 1e-13


@pytest.mark.parametrize("ladder", LADDERS)
def test_attributes_that_a_forward_writes_are_written(ladder: str) -> None:
    case = MODELS["attribute_writer"]
    original = case.make()
    model = with_graphs(original, ladder, case)
    assert isinstance(original, AttributeWriter) and isinstance(model, AttributeWriter)
    for calls in (1, 2):
        x = dense(4, calls, 5)
        assert torch.equal(original(x), model(x))
        assert model.calls == calls
        assert model.hidden is not None and original.hidden is not None and torch.equal(model.hidden, original.hidden)


@pytest.mark.parametrize("ladder", LADDERS)
def test_hooks_keep_firing_and_may_be_removed(ladder: str) -> None:
    case = MODELS["hooked"]
    original = case.make()
    assert isinstance(original, Hooked)
    model = with_graphs(original, ladder, case)
    assert isinstance(model, Hooked)
    assert difference(original, model, case.one_batch()) <= 1e-13
    assert [scale.calls for scale in model.scales] == [1, 1, 1]
    for either in (original, model):
        either.first._forward_hooks.clear()
    assert difference(original, model, case.one_batch()) <= 1e-13
    assert [scale.calls for scale in model.scales] == [1, 2, 2]


def test_a_hook_that_is_registered_after_capture_on_the_model_fires() -> None:
    case = MODELS["mlp"]
    for ladder in LADDERS:
        model = with_graphs(case.make(), ladder, case)
        calls: list[int] = []
        model.register_forward_hook(lambda module, args, output, calls=calls: calls.append(1))
        model(*case.one_batch())
        assert calls == [1]


def test_a_traced_number_may_change_from_call_to_call() -> None:
    case = MODELS["factor"]
    original = case.make()
    model = with_graphs(original, "fx", case)
    assert isinstance(model, Factor)
    x = dense(4, 1, 5)
    for arguments in ((x,), (x, 2.5), (x, -1.0)):
        assert torch.equal(model(*arguments), original(*arguments))
    assert torch.equal(model(x=x, factor=7.0), original(x, 7.0))


@pytest.mark.parametrize("other", [3.5, 1])
def test_an_exported_number_is_never_silently_the_old_one(other: float) -> None:
    case = MODELS["factor"]
    original = case.make()
    model = with_graphs(original, "export", case)
    x = dense(4, 1, 5)
    assert torch.equal(model(x, 2.5), original(x, 2.5))
    try:
        got = model(x, other)
    except Exception:
        return
    assert torch.equal(got, original(x, other))


@pytest.mark.parametrize("given", [True, False])
def test_an_optional_argument_is_never_silently_ignored_by_an_exported_graph(given: bool) -> None:
    original = MODELS["optional_mask"].make()
    x, mask = dense(4, 1, 5), dense(4, 2, 7)
    examples, others = ((x, mask), (x,)) if given else ((x,), (x, mask))
    model = copy.deepcopy(original)
    (region, *_) = capture_export(model, examples).regions
    use_graph(model, {region.mode: region.graph})
    assert torch.equal(model(*examples), original(*examples))
    try:
        got = model(*others)
    except Exception:
        return
    assert torch.equal(got, original(*others))


@pytest.mark.parametrize("ladder", LADDERS)
def test_arguments_may_be_given_by_name(ladder: str) -> None:
    case = MODELS["two_tower"]
    original = case.make()
    model = with_graphs(original, ladder, case)
    user, item = case.one_batch(5, 3)
    assert torch.equal(model(item=item, user=user), original(user, item))


def test_examples_may_be_a_pair_of_args_and_kwargs() -> None:
    original = MODELS["optional_mask"].make()
    model = copy.deepcopy(original)
    x, mask = dense(4, 1, 5), dense(4, 2, 7)
    (region, *_) = capture_export(model, ((x,), {"mask": mask})).regions
    use_graph(model, {region.mode: region.graph})
    assert torch.equal(model(x, mask=mask), original(x, mask))


class Handler(logging.Handler):
    """A person's own, which leaves something behind."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class Collects(nn.Module):
    """Has garbage collected in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        gc.collect()
        return self.layer(x)


def test_what_runs_at_a_garbage_collection_is_no_part_of_the_model() -> None:
    seen = []

    def callback(phase: str, info: dict[str, int]) -> None:
        try:
            seen.append(phase)
        except RecursionError:
            pass

    gc.callbacks.append(callback)
    try:
        kept = capture(Collects()).kept
    finally:
        gc.callbacks.remove(callback)
    assert seen
    assert not any("try" in reason for reason in kept.values())


def test_log_handlers_that_run_during_capture_are_no_part_of_the_model() -> None:
    """torch logs while it exports."""
    case = MODELS["mode_branch"]
    logger, handler = logging.getLogger("torch"), Handler()
    level, trace = logger.level, logging.getLogger("torch.__trace")
    logger.addHandler(handler)
    trace.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        assert captured(case.make(), "export", case).notes == ()
    finally:
        logger.setLevel(level)
        trace.removeHandler(handler)
        logger.removeHandler(handler)


@pytest.mark.parametrize("ladder", LADDERS)
def test_an_error_in_a_region_without_gradient_leaves_gradients_on(ladder: str) -> None:
    case = MODELS["no_grad"]
    model = with_graphs(case.make(), ladder, case)
    try:
        with pytest.raises(IndexError):
            model(torch.tensor([[0, 11, 1]]))
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def traced_with_a_hook() -> nn.Module:
    inner = fx.symbolic_trace(nn.Sequential(nn.Linear(5, 4), nn.Tanh()))
    inner.register_forward_hook(lambda module, args, output: output * 2)
    return nn.Sequential(inner, nn.Linear(4, 3)).double()


def test_a_part_that_is_a_traced_module_with_a_hook_is_captured_by_itself() -> None:
    """It stays in the model's graph as a call, and its sites belong to its own region only."""
    model = traced_with_a_hook()
    found = capture(model)
    sites = [(region.path, site.weight) for region in found.regions for site in find_sites(region.graph, region.path)]
    assert {weight for _, weight in sites} == {"0.0.weight", "1.weight"}
    plan = make_plan(model, found, "colwise", 2)
    assert {row.parameter for row in plan.rows} == {"0.0.weight", "0.0.bias", "1.weight", "1.bias"}


# ---------------------------------------------------------------- sharded, on two ranks


@pytest.mark.parametrize(("name", "ladder"), by_ladder(*ODD))
def test_an_odd_model_trains_as_in_one_process(pool: Pool, name: str, ladder: str) -> None:
    case, examples = MODELS[name], ladder == "export"
    setting = Setting(name, examples=examples, by_rank=case.mixes_rows)
    results = pool.run(train_both, setting, world_size=2, timeout=120)
    require_equal(results)
    strategies = results[0].strategies
    replicated = {parameter for parameter, strategy in strategies.items() if strategy == "replicate"}
    assert examples or replicated >= case.replicated


@pytest.mark.parametrize("capture_training", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("examples", [False, True], ids=LADDERS)
def test_dropout_and_batch_norm_follow_the_mode_after_capture(
    pool: Pool, examples: bool, training: bool, capture_training: bool
) -> None:
    for name in ("batch_norm", "dropout"):
        setting = Setting(
            name, examples=examples, by_rank=True, training=training, capture_training=capture_training, steps=1
        )
        require_equal(pool.run(train_both, setting, world_size=2, timeout=120))


def hook_calls(mesh: DeviceMesh) -> list[int]:
    model = MODELS["hooked"].make()
    assert isinstance(model, Hooked)
    sharded = autoshard(model, mesh, "paired")
    sharded(dense(4, 1, 5))
    restored = unshard(sharded)
    restored(dense(4, 1, 5))
    return [scale.calls for scale in model.scales]


def test_hooks_fire_once_a_call_sharded_and_after_unshard(pool: Pool) -> None:
    assert pool.run(hook_calls, world_size=2, timeout=120) == [[2, 2, 2]] * 2


def identity_of_model(mesh: DeviceMesh) -> bool:
    model = MODELS["dict"].make()
    parts = dict(model.named_modules())
    sharded = autoshard(model, mesh, "paired")
    return (
        sharded is model
        and all(parts[path] is module for path, module in sharded.named_modules())
        and isinstance(sharded, type(MODELS["dict"].make()))
        and type(sharded).__name__ == "DictModel"
    )


def test_modules_keep_their_identity_and_class(pool: Pool) -> None:
    assert pool.run(identity_of_model, world_size=2, timeout=120) == [True, True]
