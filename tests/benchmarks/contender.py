"""What takes part in a benchmark: a workload, and those who compute it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

FLOOR = "floor"


@dataclass(frozen=True)
class Contender:
    """One who computes a workload, on every rank.

    forward: this rank's result, without a gradient.
    step: the same result, with everything that a training step does.
    in_order: puts the columns of a result into the workload's order, where the contender has one of its own.
    """

    forward: Callable[[], Tensor]
    step: Callable[[], Tensor]
    in_order: Callable[[Tensor], Tensor] = lambda result: result


# By name what makes each contender, so that only those are made that run. Making one is collective.
Contenders = Mapping[str, Callable[[], Contender]]


class Workload(Protocol):
    """Sizes. Every contender but the floor gives the result of `reference`."""

    def contenders(self, mesh: DeviceMesh) -> Contenders: ...

    def reference(self, rank: int, world: int) -> Tensor:
        """What one process computes of the batch of this rank."""


Sizes = TypeVar("Sizes", bound=Workload)


def resized(workload: Sizes, sizes: Sequence[str]) -> Sizes:
    """The workload with other sizes, each given as NAME=NUMBER."""
    pairs = (item.partition("=") for item in sizes)
    changed: Sizes = dataclasses.replace(workload, **{name: int(number) for name, _, number in pairs})  # type: ignore[type-var]  # all are dataclasses
    return changed


def differentiated(
    call: Callable[[], Tensor], leaves: Sequence[Tensor], in_order: Callable[[Tensor], Tensor] | None = None
) -> Contender:
    """A contender whose step is forward, and backward from a gradient of ones to fresh gradients of the leaves."""

    def step() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        out = call()
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return out.detach()

    made = Contender(torch.no_grad()(call), step)
    return made if in_order is None else Contender(made.forward, made.step, in_order)


def eager_and_compiled(name: str, make: Callable[[], nn.Module], *inputs: Tensor) -> dict[str, Callable[[], Contender]]:
    """A module as it is, and under torch.compile in one graph. Inputs that require a gradient get one."""

    def build(compiled: bool) -> Contender:
        module = make()
        run: Any = torch.compile(module, fullgraph=True) if compiled else module
        leaves = [*module.parameters(), *(x for x in inputs if x.requires_grad)]
        return differentiated(lambda: run(*inputs), leaves)

    return {f"{name} eager": lambda: build(False), f"{name} compiled": lambda: build(True)}
