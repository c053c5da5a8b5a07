"""Where a node comes from, as a person knows it: the module and the source line."""

from __future__ import annotations

from torch import fx

_TRACERS = ("/torch/", "/autoshard/capture.py")


def module_path(node: fx.Node) -> str:
    """The path of the innermost module whose forward made the node, without the tracers' decorations."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0]).removeprefix("L['self']").lstrip(".")
    return "" if path.startswith("_empty_nn_module_stack") else path


def source_line(node: fx.Node) -> str:
    """`file:line` of the innermost user code that made the node, or "" where the tracer recorded none."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    user_lines = [line for line in lines if not any(part in line for part in _TRACERS)]
    if not user_lines:
        return ""
    file, line, *_ = user_lines[-1].removeprefix("File ").split(", ")
    return f"{file.strip(chr(34))}:{line.removeprefix('line ')}"
