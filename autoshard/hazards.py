"""What `torch.fx` tracing would silently get wrong, found in the source of the code that a trace ran.

A trace runs a forward once, with proxies for tensors. Code that asks a proxy what it is (`x is None`, `isinstance(x,
...)`), that depends on a mode (`self.training`, a `with` block), or that leaves something behind (`self.cache = x`)
runs, and the graph is wrong for the next call. So the code that ran is read, and a module with such code is left as it
is: inside of it tracing goes on at its children, and nothing is lost but optimisations across it.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import logging
import os
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

_TYPE_QUESTIONS = frozenset({"isinstance", "issubclass", "type", "hasattr", "getattr", "callable", "id"})
_MODE_QUESTIONS = frozenset(
    {"training", "is_grad_enabled", "is_autocast_enabled", "is_tensor", "is_inference_mode_enabled"}
)
_OUTSIDE_STATE = frozenset({"random", "time", "datetime", "numpy", "os"})
# Folders, with the separator behind them: torchrec is not below torch.
_TRUSTED = tuple(
    os.path.join(folder, "")
    for folder in (Path(torch.__file__).parent, sysconfig.get_paths()["stdlib"], Path(__file__).parent)
)

_LOGGING = str(Path(logging.__file__).parent)
# What torch itself runs while it captures.
_DEPENDENCIES = (
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "filelock",
    "fsspec",
    "torchgen",
    "typing_extensions",
    "numpy",
)

Executed = tuple[CodeType, "dict[str, Any]"]


class Recorder:
    """While active, remembers which functions of a user's code ran in this thread, in order."""

    def __init__(self) -> None:
        self.executed: list[Executed] = []

    def __enter__(self) -> Recorder:
        # A trace function is told of calls of Python code alone; a profile function of every return and C call, too.
        self._previous = sys.gettrace()
        self._outermost = sys._getframe(1)
        self._collectors = {getattr(callback, "__code__", None) for callback in gc.callbacks}
        sys.settrace(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)
        del self._outermost

    def _see(self, frame: FrameType, event: Any, argument: object) -> Any:
        """Returns what traces the lines of the frame: a debugger's function, if there is one."""
        code = frame.f_code
        if _is_user_file(code.co_filename) and not code.co_name.startswith("<") and not self._beside(frame):
            self.executed.append((code, frame.f_globals))
        return None if self._previous is None else self._previous(frame, event, argument)

    def _beside(self, frame: FrameType | None) -> bool:
        """True below an import, which torch does late while it traces, a log message, and what runs at a collection."""
        while frame is not None and frame is not self._outermost:
            code = frame.f_code
            if code.co_name == "<module>" or code.co_filename.startswith(("<frozen importlib", _LOGGING)):
                return True
            if code in self._collectors:
                return True
            frame = frame.f_back
        return False


@functools.cache
def _is_user_file(file: str) -> bool:
    inside = file.partition("site-packages/")[2]
    library = inside.partition("/")[0].removesuffix(".py")
    if (not inside and file.startswith(_TRUSTED[1])) or library in _DEPENDENCIES:
        return False
    return not file.startswith((_TRUSTED[0], _TRUSTED[2], "<"))


def find(executed: list[Executed]) -> str | None:
    """The first hazard for a trace with proxies in these functions as `file:line: what`, or None."""
    for code, namespace in executed:
        hazard = _hazard(code, code.co_filename, _judge) or find_effect([(code, namespace)])
        if hazard is not None:
            return hazard
    return None


def find_effect(executed: list[Executed]) -> str | None:
    """The first effect or outside state in these functions, which no graph holds, as `file:line: what`; or None."""
    for code, namespace in executed:
        hazard = _hazard(code, code.co_filename, _judge_effect) or _outside_state(code, namespace)
        if hazard is not None:
            return hazard
    return None


def _outside_state(code: CodeType, namespace: dict[str, Any]) -> str | None:
    for name in code.co_names:
        value = namespace.get(name)
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] in _OUTSIDE_STATE:
            return f"{code.co_filename}:{code.co_firstlineno}: uses {value.__name__}"
    return None


@functools.cache
def _hazard(code: CodeType, file: str, judge: Callable[[ast.AST], str | None]) -> str | None:
    """`file` is that of the code: equal code of two files is one key."""
    function = parse(code)
    if function is None:
        return f"{file}:{code.co_firstlineno}: the source of {code.co_name} cannot be read"
    for node in ast.walk(function):
        what = judge(node)
        if what is not None:
            line = code.co_firstlineno + getattr(node, "lineno", 1) - 1
            return f"{file}:{line}: {what}"
    return None


def parse(code: Any) -> ast.AST | None:
    """The syntax tree of a function or code object; None where the source cannot be had."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None


def _judge(node: ast.AST) -> str | None:
    match node:
        case ast.Compare(ops=ops) if any(isinstance(op, (ast.Is, ast.IsNot)) for op in ops):
            if not _is_own(node.left):
                return f"asks `{ast.unparse(node)}` of a value"
        case ast.Call(func=ast.Name(id=name)) if name in _TYPE_QUESTIONS:
            if not (node.args and _is_own(node.args[0])):
                return f"asks `{ast.unparse(node)}` of a value"
        case ast.Attribute(attr=attribute) if attribute in _MODE_QUESTIONS:
            return f"depends on `{ast.unparse(node)}`"
        case ast.With() | ast.AsyncWith():
            return "has a `with` block"
        case ast.Try():
            return "has a `try` block"
    return None


def _judge_effect(node: ast.AST) -> str | None:
    match node:
        case ast.Global() | ast.Nonlocal():
            return f"writes `{', '.join(node.names)}` outside of itself"
        case ast.Assign(targets=targets) if any(_writes_attribute(target) for target in targets):
            return f"writes an attribute: `{ast.unparse(node)}`"
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target) if _writes_attribute(target):
            return f"writes an attribute: `{ast.unparse(node)}`"
        case ast.Expr(value=ast.Call(func=function)):
            if (_is_own(function) and not _is_in_place(function)) or isinstance(function, ast.Name):
                return f"calls `{ast.unparse(node)}` for its effect"
    return None


def _is_own(node: ast.AST) -> bool:
    """True for an expression rooted at `self`: a module's attribute, never a proxy that is None or of another type."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"


def _is_in_place(function: ast.AST) -> bool:
    """True for a tensor's method that torch writes with an underscore, `buffer.add_`: graphs hold those."""
    return isinstance(function, ast.Attribute) and function.attr.endswith("_") and not function.attr.endswith("__")


def _writes_attribute(target: ast.AST) -> bool:
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(_writes_attribute(element) for element in target.elts)
    if isinstance(target, ast.Subscript):
        return isinstance(target.value, ast.Attribute)
    return isinstance(target, ast.Attribute)


_HARMLESS_READS = frozenset({"dtype", "device", "shape", "size", "ndim", "requires_grad", "dim", "is_cuda"})


def parameter_reads(module: torch.nn.Module) -> Iterator[tuple[str, ...]]:
    """Paths of the parameters that a module's forward may read: `self.child.weight` -> ("child", "weight").

    Where the child goes by another name (`head = self.child; head.weight`), it may be any module that has such a
    parameter.
    """
    paths = [tuple(name.split(".")) for name, _ in module.named_parameters(remove_duplicate=False)]
    for tree in _reachable(type(module)):
        harmless = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in _HARMLESS_READS
        }
        harmless |= {
            id(node.args[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and _name(node.func) == "isinstance" and node.args
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in harmless:
                path = _own_path(node)
                if len(path) > 1:
                    yield path
                elif path:
                    yield from _own_parameters(module, path[0])
                elif not path and not _is_module_constant(node):
                    yield from (names for names in paths if names[-1] == node.attr)


def _own_parameters(module: torch.nn.Module, name: str) -> Iterator[tuple[str, ...]]:
    """What `self.name` gives of parameters: one, or all of a list or dict of them."""
    if name in module._parameters:
        yield (name,)
    child = module._modules.get(name)
    if isinstance(child, (torch.nn.ParameterList, torch.nn.ParameterDict)):
        yield from ((name, key) for key in child._parameters)


def _reachable(cls: type) -> Iterator[ast.AST]:
    """The syntax of forward and of the methods that it mentions, and so on; torch.nn.Module's own left out."""
    methods: dict[str, Any] = {}
    for base in cls.__mro__:
        if base is torch.nn.Module:
            break
        for name, value in vars(base).items():
            if inspect.isfunction(value):
                methods.setdefault(name, value)
    waiting, seen = ["forward"], {"forward"}
    while waiting:
        tree = parse(methods.get(waiting.pop()))
        if tree is not None:
            yield tree
            mentioned = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            waiting += (mentioned & methods.keys()) - seen
            seen |= mentioned


def _is_module_constant(node: ast.Attribute) -> bool:
    """True for `torch.something` and the like, whose root is an imported module by convention."""
    root: ast.AST = node
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(root, ast.Name) and root.id in ("torch", "F", "nn", "math", "np")


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _own_path(node: ast.AST) -> tuple[str, ...]:
    """("a", "b") for `self.a.b`, () for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return tuple(reversed(names)) if isinstance(node, ast.Name) and node.id == "self" else ()
