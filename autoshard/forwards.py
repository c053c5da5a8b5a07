"""Modules learn to use sharded parameters: their forward becomes a graph, or runs on plain tensors.

Who reads a parameter gets what it can use:

    a traced graph             the DTensor; the graph's own nodes make a plain tensor of it
    a module's own forward     a plain tensor, whose gradient is reduced over the ranks (`replicate_parameter`)
    everybody else             the DTensor: optimizers, state_dict, checkpoints, initialisation

Within one call of the model's forward, a module's own code gets the same plain tensor however often it reads a
parameter (`SharedReads`): its gradient is reduced once. A recurrent cell costs one all_reduce, not one per step, and
ranks whose loops are not equally long take part in equally many.

The second row works through a twin: an object that shares the module's `__dict__`, of a class in which each parameter
is a property. The module's forward runs with the twin as its `self`. What it writes, it writes into the module.

A module stays the object that it is; its class becomes a subclass of its class, made by a recipe. The recipe is plain
data, so that the module can be copied and pickled.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import linecache
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.graph_module import _format_import_block
from torch.package.importer import sys_importer

from autoshard import stacks
from passes.errors import InputError, describe
from passes.ops.redistribute import replicate_parameter
from passes.optimize.batch_lookups import stacks_of

_TWIN = "_autoshard_twin"
_RECIPE = "_autoshard_recipe"
_ORIGINAL = "_autoshard_original"
_READS = "_autoshard_reads"
_SPECS = ("_in_spec", "_out_spec")
_numbers = itertools.count()


class Recipe(Protocol):
    """How the class of a module is made out of its original class."""

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """What the class defines."""

    def twin_namespace(self) -> dict[str, Any] | None:
        """What the class of the module's twin defines; None if it has no twin."""


@dataclasses.dataclass(frozen=True)
class GraphForward:
    """The forward of a rewritten graph.

    Attributes:
        sources: mode (`training`) -> Python source of a function `forward`; the key None for one that is for both.
        attributes: what these functions need of the module's class: how torch.export's code takes its arguments apart.
        mode_sensitive: paths of submodules that compute something else in training; where there is a graph for each
            mode, they have to be in the mode of the module.
        stacks: the tables that are looked up together.
    """

    sources: Mapping[bool | None, str]
    attributes: Mapping[str, Any]
    mode_sensitive: tuple[str, ...]
    stacks: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, graphs: Mapping[bool | None, fx.GraphModule], mode_sensitive: tuple[str, ...] = ()) -> GraphForward:
        """The recipe for these graphs, one for each mode or one under None."""
        sources: dict[bool | None, str] = {}
        attributes: dict[str, Any] = {}
        found: dict[str, tuple[str, ...]] = {}
        for mode, graph_module in graphs.items():
            found |= stacks_of(graph_module.graph)
            for node in graph_module.graph.nodes:
                node.type = None  # annotations: the code needs none, and some are names of the model's own file
            code = graph_module.graph.python_code("self")
            sources[mode] = f"{_format_import_block(code.globals, sys_importer)}\n{code.src}"
            attributes |= {name: vars(graph_module)[name] for name in _SPECS if name in vars(graph_module)}
        return cls(sources, attributes, mode_sensitive, found)

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """The graph's code as `forward`."""
        forwards = {mode: _compile(source) for mode, source in self.sources.items()}
        if None in forwards:
            run = forwards[None]
        else:
            run = _by_mode(forwards, self.mode_sensitive)

        if any("_set_grad_enabled" in source for source in self.sources.values()):
            run = _restoring_grad_mode(run)

        @functools.wraps(original.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return run(self, *args, **kwargs)

        defined = {"forward": forward, **self.attributes}
        if not self.stacks:
            return defined
        copying = stacks.copying(_deepcopy, self.stacks)
        return {**defined, **stacks.namespace(original, forward, self.stacks), "__deepcopy__": copying}

    def twin_namespace(self) -> None:
        """None: a graph reads the DTensors."""


@dataclasses.dataclass(frozen=True)
class LocalForward:
    """The module's own forward, for which these parameters are plain tensors."""

    parameters: tuple[str, ...]
    group: str
    reduction: str

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """The original forward, run on the twin."""

        @functools.wraps(original.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return original.forward(self.__dict__[_TWIN], *args, **kwargs)

        return {"forward": forward}

    def twin_namespace(self) -> dict[str, Any]:
        """A property for each parameter."""
        return _local_properties(self.parameters, self.group, self.reduction)


@dataclasses.dataclass(frozen=True)
class LocalForAll:
    """These parameters are plain tensors for everybody: another module's code reads them."""

    parameters: tuple[str, ...]
    group: str
    reduction: str

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """A property for each parameter."""
        return _local_properties(self.parameters, self.group, self.reduction)

    def twin_namespace(self) -> None:
        """None: the module itself has the properties."""


@dataclasses.dataclass(frozen=True)
class ModelForward:
    """The forward of the whole model, which is that of `inner` or its own; reads within it are shared."""

    inner: Recipe | None

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """The forward within a scope of shared reads."""
        defined = {} if self.inner is None else self.inner.namespace(original)
        run = defined.get("forward", original.forward)

        @functools.wraps(original.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self.__dict__[_READS].scope():
                return run(self, *args, **kwargs)

        return {**defined, "forward": forward}

    def twin_namespace(self) -> dict[str, Any] | None:
        """That of `inner`."""
        return None if self.inner is None else self.inner.twin_namespace()


class SharedReads:
    """The plain tensors of replicated parameters, made once per call of the model's forward."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, bool], Tensor] | None = None

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Reads in here are shared; a scope in a scope is the outer one."""
        if self._made is not None or torch.compiler.is_compiling():
            yield
            return
        self._made = {}
        try:
            yield
        finally:
            self._made = None

    def read(self, parameter: Tensor, group: str, reduction: str) -> Tensor:
        """What `replicate_parameter` gives."""
        # Compiled code reads anew: an activation checkpoint inside of it may not write to what is outside.
        if self._made is None or torch.compiler.is_compiling():
            return replicate_parameter(parameter, group, reduction)
        # What was made without gradients must not reach code that wants them.
        key = id(parameter), torch.is_grad_enabled()
        if key not in self._made:
            self._made[key] = replicate_parameter(parameter, group, reduction)
        return self._made[key]


def share_reads(model: nn.Module) -> None:
    """Shares the reads of all modules within each call of the model's forward. The last step of an installation."""
    reads = SharedReads()
    readers = [m for m in model.modules() if isinstance(getattr(type(m), _RECIPE, None), (LocalForward, LocalForAll))]
    if readers:
        for module in {*readers, model}:
            module.__dict__[_READS] = reads
        recipe = getattr(type(model), _RECIPE, None)
        restore_class(model)
        install(model, ModelForward(recipe))


def use_graph(
    module: nn.Module, graphs: Mapping[bool | None, fx.GraphModule], mode_sensitive: tuple[str, ...] = ()
) -> None:
    """Gives a module the forward of its rewritten graph, and what the graph has of its own."""
    for graph in graphs.values():
        _adopt_attributes(module, graph)
    recipe = GraphForward.of(graphs, mode_sensitive)
    install(module, recipe)
    if recipe.stacks:
        stacks.keep(module, recipe.stacks)


def use_local_parameters(module: nn.Module, names: tuple[str, ...], group: str, reduction: str) -> None:
    """Lets a module's own forward see its replicated parameters, those of `names`, as plain tensors.

    A module without a forward of its own has its parameters read by others, so everybody sees them so.
    """
    without_forward = type(module).forward is nn.Module.forward
    if without_forward or isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        install(module, LocalForAll(names, group, reduction))
    else:
        install(module, LocalForward(names, group, reduction))


def expose_parameters(module: nn.Module, names: tuple[str, ...], group: str, reduction: str) -> None:
    """Lets everybody see a module's replicated parameters, those of `names`, as plain tensors."""
    install(module, LocalForAll(names, group, reduction))


def install(module: nn.Module, recipe: Recipe) -> None:
    """Makes the module's class by the recipe."""
    original = type(module)
    own = {_ORIGINAL: original, _RECIPE: recipe, "__reduce_ex__": _reduce}
    namespace = recipe.namespace(original)
    if isinstance(module, fx.GraphModule) and "__deepcopy__" not in namespace:
        own["__deepcopy__"] = _deepcopy  # torch's own makes a module of the graph as it was traced
    module.__class__ = _subclass(original, {**namespace, **own})
    twin_namespace = recipe.twin_namespace()
    if twin_namespace is not None:
        twin = object.__new__(_subclass(original, twin_namespace))
        object.__setattr__(twin, "__dict__", module.__dict__)
        module.__dict__[_TWIN] = twin


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before `autoshard()`."""
    cls: type[nn.Module] = getattr(type(module), _ORIGINAL, type(module))
    return cls


def restore(module: nn.Module) -> None:
    """Gives a module its own class and forward back."""
    module.__dict__.pop(_READS, None)
    stacks.release(module)
    restore_class(module)


def restore_class(module: nn.Module) -> None:
    """Gives a module its own class back."""
    module.__dict__.pop(_TWIN, None)
    module.__class__ = original_class(module)


def _reduce(self: nn.Module, _: Any) -> Any:
    state = self.__getstate__()  # torch's recurrent layers leave out what cannot be pickled
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name != _TWIN}
    return _rebuild, (original_class(self), getattr(type(self), _RECIPE)), state


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    rebuild, arguments, state = _reduce(self, None)
    module: nn.Module = rebuild(*arguments)
    memo[id(self)] = module
    module.__setstate__(copy.deepcopy(state, memo))
    return module


def _rebuild(original: type[nn.Module], recipe: Recipe) -> nn.Module:
    module: nn.Module = object.__new__(original)
    install(module, recipe)
    return module


def _by_mode(forwards: Mapping[bool | None, Callable[..., Any]], mode_sensitive: tuple[str, ...]) -> Callable[..., Any]:
    """The forward for the module's mode; all submodules that care have to be in that mode."""

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for path in mode_sensitive:
            if self.get_submodule(path).training != self.training:
                raise InputError(
                    describe(
                        path,
                        f"it is in {_mode(not self.training)} mode, the model in {_mode(self.training)} mode",
                        "one mode: the model was captured by torch.export, which has one graph for each",
                        "Set the mode of the whole model, or call autoshard() without example_inputs.",
                    )
                )
        return forwards[self.training](self, *args, **kwargs)

    return run


def _restoring_grad_mode(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, for a graph with a region of another grad mode, which an error inside must not leave on."""

    def restoring(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            return run(self, *args, **kwargs)

    return restoring


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def _compile(source: str) -> Callable[..., Any]:
    """The function `forward` of a source, whose lines a traceback can show."""
    file = f"<autoshard graph {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {}
    exec(compile(source, file, "exec"), namespace)
    function: Callable[..., Any] = namespace["forward"]
    return function


def _adopt_attributes(module: nn.Module, graph: nn.Module) -> None:
    """Gives a module what its graph has of its own: lifted constants and nested graphs."""
    for name, buffer in graph._buffers.items():
        if not hasattr(module, name):
            module.register_buffer(name, buffer, persistent=False)
    for name, child in graph._modules.items():
        if not hasattr(module, name):
            module.__dict__[name] = child


def _local_properties(names: tuple[str, ...], group: str, reduction: str) -> dict[str, Any]:
    return {name: _local_property(name, group, reduction) for name in names}


def _local_property(name: str, group: str, reduction: str) -> property:
    def read(self: nn.Module) -> Tensor | None:
        parameter = self._parameters[name]
        reads = self.__dict__.get(_READS)
        if parameter is None or reads is None:
            return parameter if parameter is None else replicate_parameter(parameter, group, reduction)
        return cast(Tensor, reads.read(parameter, group, reduction))

    return property(read)


def _subclass(cls: type[nn.Module], namespace: dict[str, Any]) -> type[nn.Module]:
    """A subclass that goes by the name of its base."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, **namespace})
