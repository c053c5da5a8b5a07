"""Capture: an nn.Module -> traced graphs that reach every layer, by a ladder.

1. With example inputs, `torch.export` of the whole model with dynamic batch dimensions, once per mode (train, eval).
2. `torch.fx` symbolic tracing of the whole model. A submodule that cannot be traced, or that a trace would get wrong
   (`autoshard.hazards`), stays in the graph as a call of that submodule.
3. The same inside of each submodule that stayed as it is.
4. Every layer by itself, so that a layer is right from wherever it is called.

A traced module keeps its identity, its hooks and its place in the model; only its forward is replaced by the graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from autoshard import hazards, torchrec_modules
from passes.normalize import layer_graph
from passes.sites import LAYER_TYPES, find_sites, has_hooks

_LAYERS = tuple(LAYER_TYPES)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_MODE_SETTERS = frozenset({"_set_grad_enabled", "_enter_autocast", "_enter_inference_mode"})


@dataclasses.dataclass(frozen=True)
class Region:
    """A traced module.

    Attributes:
        path: of the module in the model, "" for the model itself.
        module: the module.
        graph: its forward, still with whole parameters.
        mode: the value of `module.training` that the graph is for, None if it is for both.
        is_layer: True for the graph of a single layer, which stands for it when it is called from outside a larger
            graph.
    """

    path: str
    module: nn.Module
    graph: fx.GraphModule
    mode: bool | None = None
    is_layer: bool = False


@dataclasses.dataclass(frozen=True)
class Capture:
    """What was captured of a model.

    Attributes:
        regions: the traced modules.
        kept: path -> reason, for the modules that run as they are.
        notes: why the ladder went a step down, where it did.
        mode_sensitive: where the model has a graph for each mode, the submodules that must not be in the other mode.
    """

    regions: tuple[Region, ...]
    kept: dict[str, str]
    notes: tuple[str, ...] = ()
    mode_sensitive: tuple[str, ...] = ()


class Untraceable(Exception):
    """A trace of this module would fail, or be wrong."""


def capture(model: nn.Module) -> Capture:
    """Captures a model without example inputs. The model is not changed.

    Args:
        model: any module.

    Returns:
        Graphs that together hold every embedding, embedding_bag and linear that can be reached.
    """
    regions: list[Region] = []
    kept: dict[str, str] = {}
    seen: set[int] = set()
    _descend(model, "", regions, kept, seen)
    regions.extend(layer_regions(model, {id(region.module) for region in regions}, kept))
    return Capture(tuple(regions), kept)


def layer_regions(model: nn.Module, done: set[int], kept: dict[str, str]) -> Iterator[Region]:
    """The graph of each single layer that is not in `done`."""
    for path, module in model.named_modules():
        if isinstance(module, _LAYERS) and id(module) not in done:
            graph, reason, _ = trace(module)
            if graph is not None and find_sites(graph, path):
                kept.pop(path, None)
                yield Region(path, module, graph, is_layer=True)
            else:
                kept[path] = reason or "its forward uses no parameter of its own as a weight"


def _descend(module: nn.Module, path: str, regions: list[Region], kept: dict[str, str], seen: set[int]) -> None:
    if id(module) in seen or not _may_hold_sites(module):
        return
    seen.add(id(module))
    inner: list[str] = []
    if not isinstance(module, _CONTAINERS):
        graph, reason, inside = trace(module)
        if graph is not None:
            if find_sites(graph, path):
                regions.append(Region(path, module, graph, is_layer=isinstance(module, _LAYERS)))
            kept.update({_join(path, name): why for name, why in inside.items()})
            inner = [str(node.target) for node in graph.graph.find_nodes(op="call_module")]
        else:
            kept[path] = reason
            inner = [name for name, _ in module.named_children()]
    else:
        inner = [name for name, _ in module.named_children()]
    for name in dict.fromkeys(inner):
        _descend(module.get_submodule(name), _join(path, name), regions, kept, seen)


def _may_hold_sites(module: nn.Module) -> bool:
    """False for torch's own modules without a layer inside, and for any without parameters."""
    if type(module).__module__.startswith("torch.nn"):
        return any(isinstance(inner, _LAYERS) for inner in module.modules())
    return next(module.parameters(), None) is not None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def trace(module: nn.Module) -> tuple[fx.GraphModule | None, str, dict[str, str]]:
    """Symbolically traces one module.

    Returns:
        The graph, or None where the module has to stay as it is; the reason why; and path -> reason for the submodules
        that stand in the graph as they are.
    """
    own = torchrec_modules.graph_of(module) or layer_graph(module)
    if own is not None:
        return fx.GraphModule(module, own, type(module).__name__), "", {}
    tracer = _Tracer()
    try:
        with unchanged(module):
            graph = tracer.trace(module)
    except Exception as error:  # whatever a forward raises on proxies
        return None, _first_line(error), {}
    hazard = hazards.find(tracer.recorder.executed)
    if hazard is not None:
        return None, hazard, {}
    return fx.GraphModule(module, graph, type(module).__name__), "", tracer.kept


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


class _Tracer(fx.Tracer):
    """Symbolic tracing that leaves in the graph, as a call, each submodule that it cannot trace or would get wrong."""

    proxy_buffer_attributes = True
    record_stack_traces = True

    def __init__(self) -> None:
        super().__init__()
        self.recorder = hazards.Recorder()
        self.kept: dict[str, str] = {}
        self._parameters: dict[int, tuple[str, nn.Parameter]] = {}

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        self._parameters = {id(p): (name, p) for name, p in root.named_parameters()}
        with self.recorder, _NoHiddenTensors(), no_custom_functions():
            return super().trace(root, concrete_args)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if has_hooks(m) or torchrec_modules.is_collection(m):
            return True
        if type(m) in _LAYERS or isinstance(m, (nn.Sequential, fx.GraphModule)):
            return False
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        nodes, executed, stack = len(self.graph.nodes), len(self.recorder.executed), self.module_stack.copy()
        try:
            out = super().call_module(m, forward, args, kwargs)
            hazard = hazards.find(self.recorder.executed[executed:])
            if hazard is not None:
                raise Untraceable(hazard)
            return out
        except Exception as error:  # whatever a forward raises on proxies
            self.kept[path] = _first_line(error)
            self.module_stack = stack
            del self.recorder.executed[executed:]
            for node in list(self.graph.nodes)[: nodes - 1 : -1]:
                self.graph.erase_node(node)
            return self.create_proxy("call_module", path, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """fx would go through all parameters for each that is read."""
        name, parameter = self._parameters.get(id(attr_val), ("", None))
        if parameter is None or parameter is not attr_val:
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            if not any(a is buffer for buffer in self.root.buffers()):
                raise Untraceable("uses a tensor that is neither a parameter nor a buffer")
        return super().create_arg(a)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undoes what a forward writes into its modules while it is captured."""
    before = [(module, dict(vars(module)), _containers(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, containers in before:
            vars(module).clear()
            vars(module).update(attributes)
            for container, content in containers:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)


def _containers(module: nn.Module) -> list[tuple[Any, Any]]:
    """The lists, dicts and sets among a module's attributes, each with a copy of what is in it."""
    return [(value, value.copy()) for value in vars(module).values() if isinstance(value, (list, dict, set))]


@contextlib.contextmanager
def no_custom_functions() -> Iterator[None]:
    """Refuses a model's torch.autograd.Function while capturing: a graph would lose its backward.

    A patch, as fx's own of nn.Module, for as long as the capture runs.
    """
    original = vars(Function)["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] == "torch":
            return original.__get__(None, cls)(*args, **kwargs)
        raise Untraceable(f"calls {cls.__name__}, a torch.autograd.Function whose backward a graph would lose")

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]  # put back below
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]  # the classmethod object itself


class _NoHiddenTensors(TorchFunctionMode):
    """Refuses what a trace cannot see: tensors made of no proxy (they would become constants) and changes of mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _MODE_SETTERS:
            raise Untraceable(f"changes a mode of torch ({name})")
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not isinstance(out, nn.Parameter):
            raise Untraceable(f"makes a tensor while it is traced ({name})")
        return out
