"""Two linear layers with a relu between them, on inputs that are the same on every rank: x (B, in) -> (B, in).

floor        the products of matrices and the bare all_reduce of the result; backward that of x's gradient
by hand      the first layer by column, the second by row, one all_reduce: Megatron's pair
autoshard    the plain model
dtensor      ColwiseParallel and RowwiseParallel
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from autoshard import autoshard
from passes.ops import collectives
from tests.benchmarks.contender import FLOOR, Contender, Contenders, eager_and_compiled


@dataclass(frozen=True)
class MLP:
    """in, hidden features, B."""

    inputs: int
    hidden: int
    batch: int

    def draw(self) -> Tensor:
        """x: (B, in)."""
        return torch.randn(self.batch, self.inputs, generator=torch.Generator().manual_seed(1000))

    def model(self) -> nn.Sequential:
        """The whole model, the same wherever it is made."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(self.inputs, self.hidden), nn.ReLU(), nn.Linear(self.hidden, self.inputs))

    def reference(self, rank: int, world: int) -> Tensor:
        """(B, in)."""
        del rank, world
        first, _, second = self.model()
        hidden = F.relu(F.linear(self.draw(), first.weight, first.bias))
        return F.linear(hidden, second.weight, second.bias).detach()

    def contenders(self, mesh: DeviceMesh) -> Contenders:
        """All."""
        x = self.draw().requires_grad_()
        return {
            FLOOR: lambda: _floor(self, mesh),
            **eager_and_compiled("by hand", lambda: ByHand(self, mesh), x),
            **eager_and_compiled(
                "autoshard", lambda: autoshard(self.model(), mesh, "paired", input_placement=Replicate()), x
            ),
            **eager_and_compiled("dtensor", lambda: _of_dtensors(self, mesh), x),
        }


class _Copied(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return collectives.all_reduce(gradient, ctx.group), None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return collectives.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class ByHand(nn.Module):
    """What one would write for these sizes."""

    def __init__(self, sizes: MLP, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group, rank, world = str(mesh.get_group().group_name), mesh.get_local_rank(), mesh.size()
        first, _, second = sizes.model()
        self.up, self.up_bias = (
            nn.Parameter(p.detach().chunk(world)[rank].clone()) for p in (first.weight, first.bias)
        )
        self.down = nn.Parameter(second.weight.detach().chunk(world, 1)[rank].contiguous())
        self.down_bias = nn.Parameter(second.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        copied: Tensor = _Copied.apply(x, self.group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        partial = F.linear(F.relu(F.linear(copied, self.up, self.up_bias)), self.down)
        out: Tensor = _Summed.apply(partial, self.group)  # type: ignore[no-untyped-call]  # as above
        return out + self.down_bias


def _of_dtensors(sizes: MLP, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(sizes.model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _floor(sizes: MLP, mesh: DeviceMesh) -> Contender:
    group, own = str(mesh.get_group().group_name), sizes.hidden // mesh.size()
    x, hidden = torch.randn(sizes.batch, sizes.inputs), torch.randn(sizes.batch, own)
    up, down = torch.randn(own, sizes.inputs), torch.randn(sizes.inputs, own)

    def forward() -> Tensor:
        torch.mm(x, up.t())
        return collectives.all_reduce(torch.mm(hidden, down.t()), group)

    def step() -> Tensor:
        forward()
        for gradient, entered, weight in ((x, hidden, down), (hidden, x, up)):
            torch.mm(gradient.t(), entered)
            out = torch.mm(gradient, weight)
        return collectives.all_reduce(out, group)

    return Contender(forward, step)
