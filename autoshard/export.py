"""Capture with example inputs: torch.export of the whole model, once for training and once for evaluation.

Where export refuses a model, the ladder of `autoshard.capture` goes on without the examples, and the plan's notes say
why.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import marshal
import math
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils import _pytree as pytree

from autoshard import hazards, torchrec_modules
from autoshard.capture import (
    Capture,
    Region,
    Untraceable,
    capture,
    layer_regions,
    no_custom_functions,
    unchanged,
)
from passes.errors import CaptureError, describe
from passes.sites import find_sites, has_hooks

# Modules that compute something else in training than in evaluation.
MODE_SENSITIVE = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._BatchNorm,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RReLU,
)


class InputChecks(nn.Module):
    """What torch.export checks of the inputs. Torch's own module for it holds a function that cannot be pickled."""

    _is_impure = True

    def __init__(self, code: CodeType) -> None:
        super().__init__()
        # Dynamo asks a function's globals for its built-in names.
        function = FunctionType(code, {**SYMPY_INTERP, "inf": math.inf, "__builtins__": builtins})
        self._code = code
        self.forward = torch._dynamo.dont_skip_tracing(function)

    def __reduce__(self) -> Any:
        return _input_checks, (marshal.dumps(self._code),)


def _input_checks_code(module: nn.Module | None) -> CodeType | None:
    """The code of torch.export's checks; None for another module, and where torch keeps it in another place."""
    if module is None or type(module).__name__ != "GuardsFn":
        return None
    function = inspect.getclosurevars(module.forward).nonlocals.get("func")
    code: CodeType | None = getattr(function, "__code__", None)
    return None if code is None or code.co_freevars else code


def _input_checks(code: bytes) -> InputChecks:
    return InputChecks(marshal.loads(code))


def capture_export(model: nn.Module, example_inputs: Any) -> Capture:
    """Captures a model with example inputs. The model is not changed.

    Args:
        model: any module.
        example_inputs: a tuple of arguments, or (args, kwargs). Dimension 0 of every tensor is dynamic, the others are
            what the examples have; the examples' batch should be of two rows or more.

    Raises:
        CaptureError: if the examples are no arguments of the model.
    """
    args, kwargs = arguments(example_inputs)
    obstacle = _obstacle(model)
    if obstacle is None:
        try:
            graphs = {mode: _export(model, args, kwargs, mode) for mode in (True, False)}
        except Exception as error:  # whatever a model raises in export
            _require_runnable(model, args, kwargs, error)
            obstacle = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if obstacle is not None:
        ladder = capture(model)
        note = f"captured without the example inputs: torch.export does not take the model ({obstacle})"
        return Capture(ladder.regions, ladder.kept, (note, *ladder.notes))
    if not any(find_sites(graph) for graph in graphs.values()):
        return capture(model)
    regions = _merge_modes(model, graphs)
    kept: dict[str, str] = {}
    layers = tuple(layer_regions(model, {id(model)}, kept))
    sensitive = tuple(path for path, module in model.named_modules() if path and _asks_mode(module))
    return Capture((*regions, *layers), kept, mode_sensitive=sensitive)


def arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(example_inputs, (tuple, list)):
        return (example_inputs,), {}
    items = tuple(example_inputs)
    if len(items) == 2 and isinstance(items[0], tuple) and isinstance(items[1], dict):
        return items[0], items[1]
    return items, {}


def _asks_mode(module: nn.Module) -> bool:
    """True for a module that may compute something else in training: some of torch's, and anybody's own."""
    return isinstance(module, MODE_SENSITIVE) or not type(module).__module__.startswith("torch.nn")


def _obstacle(model: nn.Module) -> str | None:
    """Why the model should not be exported, or None."""
    for path, module in model.named_modules():
        if path and has_hooks(module):
            return f"{path} has hooks, which would not run"
        if torchrec_modules.is_collection(module):
            return f"{path or 'it'} is a TorchRec {type(module).__name__}, whose features are ragged"
        if _asks_mode(module) and module.training != model.training:
            return f"{path} is in another mode than the model"
    return None


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: bool) -> fx.GraphModule:
    shapes = _dynamic_batch(model, args, kwargs)
    with _in_mode(model, mode), unchanged(model), no_custom_functions(), hazards.Recorder() as recorder:
        program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    effect = hazards.find_effect(recorder.executed)
    if effect is not None:
        raise Untraceable(effect)
    graph_module = program.module()
    for name, child in list(graph_module._modules.items()):
        code = _input_checks_code(child)
        if code is not None:
            graph_module._modules[name] = InputChecks(code)
    _rename_own_attributes(graph_module, model, f"_autoshard_{'train' if mode else 'eval'}")
    return graph_module


def _dynamic_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dynamic shapes of `torch.export`: dimension 0 of every tensor."""

    def dims(leaf: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() > 0 else None

    named = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return pytree.tree_map(dims, dict(named))


@contextlib.contextmanager
def _in_mode(model: nn.Module, mode: bool) -> Iterator[None]:
    """All modules in one mode, and each in its own again afterwards."""
    before = {module: module.training for module in model.modules()}
    model.train(mode)
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _rename_own_attributes(graph_module: fx.GraphModule, model: nn.Module, prefix: str) -> None:
    """Gives what the graph has of its own (constants, nested graphs) names that no module has."""
    own = {
        name
        for name in (*graph_module._modules, *graph_module._buffers, *graph_module._parameters)
        if not hasattr(model, name)
    }
    stores: tuple[dict[str, Any], ...] = (graph_module._modules, graph_module._buffers, graph_module._parameters)
    for store in stores:
        for name in own & store.keys():
            store[f"{prefix}_{name}"] = store.pop(name)
    for node in graph_module.graph.nodes:
        if node.op in ("get_attr", "call_module") and node.target in own:
            node.target = f"{prefix}_{node.target}"
    graph_module.recompile()


def _merge_modes(model: nn.Module, graphs: dict[bool, fx.GraphModule]) -> tuple[Region, ...]:
    """One region if training and evaluation have the same graph, else two."""
    texts = {
        mode: graph.code.replace(f"_autoshard_{'train' if mode else 'eval'}", "") for mode, graph in graphs.items()
    }
    if texts[True] == texts[False]:
        return (Region("", model, graphs[True]),)
    return tuple(Region("", model, graph, mode) for mode, graph in graphs.items())


def _require_runnable(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
    """Export failed: if the model does not take the examples at all, that is the person's to know."""
    names = f"{len(args)} arguments" + (f" and {sorted(kwargs)}" if kwargs else "")
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as mismatch:
        raise CaptureError(
            describe(
                "example_inputs",
                f"{type(model).__name__}.forward does not take {names} ({mismatch})",
                "a tuple of the model's arguments, or (args, kwargs)",
                "Pass what you would call the model with.",
            )
        ) from error
