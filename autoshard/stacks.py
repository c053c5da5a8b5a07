"""Tables that are looked up together share one storage, also after the model was moved, loaded or copied.

The graph reads a stack as a buffer of its module, which no state dict holds, and each table's shard is a view of some
of its rows. What gives the parameters other storage makes a new stack of them afterwards:

    module.to(), .double(), .cuda(), ...        `_apply`
    load_state_dict(assign=True)                a hook
    copy.deepcopy, pickle, torch.load           `__setstate__`
    all else, in eager mode                     before each call

A compiled graph finds a shard elsewhere, and raises (`passes.ops.stacked`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from passes.ops.stacked import restack
from passes.optimize.batch_lookups import first_rows_of

_STACKS = "_autoshard_stacks"

# The name of each stack's buffer -> the parameters that are views of it.
Stacks = Mapping[str, tuple[str, ...]]


def namespace(original: type[nn.Module], forward: Callable[..., Any], stacks: Stacks) -> dict[str, Any]:
    """What the class of a module with stacks defines."""

    def apply(self: nn.Module, function: Callable[..., Any], recurse: bool = True) -> nn.Module:
        held = {name: self._buffers.pop(name) for name in stacks}  # the tables are converted, one by one
        try:
            original._apply(self, function, recurse)
        finally:
            self._buffers.update(held)
        _restack(self, stacks)
        return self

    def setstate(self: nn.Module, state: dict[str, Any]) -> None:
        original.__setstate__(self, state)
        _restack(self, stacks)

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _restack(self, stacks)
        return forward(self, *args, **kwargs)

    return {"forward": run, "_apply": apply, "__setstate__": setstate}


def copying(copy: Callable[..., nn.Module], stacks: Stacks) -> Callable[..., nn.Module]:
    """A `__deepcopy__` that copies the gradients of stacked tables: torch copies no view that is in a DTensor."""

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        tables = [attrgetter(path)(self) for paths in stacks.values() for path in paths]
        gradients = [table.grad for table in tables]
        for table in tables:
            table.grad = None
        try:
            module = copy(self, memo)
        finally:
            for table, gradient in zip(tables, gradients, strict=True):
                table.grad = gradient
        for table, gradient in zip(tables, gradients, strict=True):
            memo[id(table)].grad = None if gradient is None else gradient.clone()
        return module

    return deepcopy


def keep(module: nn.Module, stacks: Stacks) -> None:
    """Stacks the tables of a module that has got its graph, and whenever another state is loaded."""
    module.__dict__[_STACKS] = dict(stacks)
    module.register_load_state_dict_post_hook(_after_load)
    for name in stacks:
        module._non_persistent_buffers_set |= {name, first_rows_of(name)}
    _restack(module, stacks)


def release(module: nn.Module) -> None:
    """Takes the stacks out of a module."""
    for name in module.__dict__.pop(_STACKS, {}):
        for buffer in (name, first_rows_of(name)):
            module._buffers.pop(buffer, None)
            module._non_persistent_buffers_set.discard(buffer)
    hooks = module._load_state_dict_post_hooks
    for key in [key for key, hook in hooks.items() if hook is _after_load]:
        del hooks[key]


def _after_load(module: nn.Module, _: Any) -> None:
    _restack(module, module.__dict__[_STACKS])


def _restack(module: nn.Module, stacks: Stacks) -> None:
    """Makes the tables views of their stacks again, where they are not. What stands in for a parameter stays."""
    for name, paths in stacks.items():
        parameters = [attrgetter(path)(module) for path in paths]
        if all(isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor) for parameter in parameters):
            table = module._buffers[name]
            assert table is not None
            module._buffers[name] = restack(table, parameters)
            first = first_rows_of(name)
            module._buffers[first] = module._buffers[first].to(parameters[0].device)  # type: ignore[union-attr]  # is there
