"""One linear layer on its own: x (B, in) on each rank, its own rows -> (B, out). x gets a gradient.

floor        the bare collectives on the same bytes and the products of matrices, nothing rearranged
by hand      all_gather of x, the product with this rank's columns, all_to_all, columns put in order
autoshard    the plain layer
dtensor      ColwiseParallel, from Shard(0) to Shard(0)

TorchRec has no linear, and the former implementation has none any more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from autoshard import autoshard
from passes.ops import collectives
from tests.benchmarks.contender import FLOOR, Contender, Contenders, eager_and_compiled


@dataclass(frozen=True)
class Linear:
    """in, out, B per rank."""

    inputs: int
    outputs: int
    batch: int

    def draw(self, rank: int) -> Tensor:
        """x of one rank: (B, in)."""
        return torch.randn(self.batch, self.inputs, generator=torch.Generator().manual_seed(1000 + rank))

    def layer(self) -> nn.Linear:
        """The whole layer, the same wherever it is made."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Linear(self.inputs, self.outputs)

    def reference(self, rank: int, world: int) -> Tensor:
        """(B, out)."""
        del world
        layer = self.layer()
        return F.linear(self.draw(rank), layer.weight, layer.bias).detach()

    def contenders(self, mesh: DeviceMesh) -> Contenders:
        """All."""
        x = self.draw(mesh.get_local_rank()).requires_grad_()
        return {
            FLOOR: lambda: _floor(self, mesh),
            **eager_and_compiled("by hand", lambda: ByHand(self, mesh), x),
            **eager_and_compiled("autoshard", lambda: autoshard(nn.Sequential(self.layer()), mesh, "colwise"), x),
            **eager_and_compiled("dtensor", lambda: _of_dtensors(self, mesh), x),
        }


class ByHand(nn.Module):
    """What one would write for these sizes. W must divide the outputs."""

    def __init__(self, sizes: Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.world, self.group, layer = mesh.size(), mesh.get_group(), sizes.layer()
        rank = mesh.get_local_rank()
        self.weight, self.bias = (
            nn.Parameter(p.detach().chunk(self.world)[rank].clone()) for p in (layer.weight, layer.bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        columns = F.linear(functional.all_gather_tensor_autograd(x, 0, self.group), self.weight, self.bias)
        splits = [x.size(0)] * self.world
        came = functional.all_to_all_single_autograd(columns, splits, splits, self.group)
        return came.view(self.world, x.size(0), -1).transpose(0, 1).reshape(x.size(0), -1)


def _of_dtensors(sizes: Linear, mesh: DeviceMesh) -> nn.Module:
    style = ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))
    return parallelize_module(nn.Sequential(sizes.layer()), mesh, {"0": style})


def _floor(sizes: Linear, mesh: DeviceMesh) -> Contender:
    group, world = str(mesh.get_group().group_name), mesh.size()
    rows, columns = world * sizes.batch, sizes.outputs // world
    own, everywhere = torch.randn(sizes.batch, sizes.inputs), torch.randn(rows, sizes.inputs)
    weight, results = torch.randn(columns, sizes.inputs), torch.randn(rows, columns)
    splits = [sizes.batch] * world

    def forward() -> Tensor:
        collectives.all_gather(own, group)
        torch.mm(everywhere, weight.t())
        return collectives.all_to_all(results, splits, splits, group)

    def step() -> Tensor:
        forward()
        gradient = collectives.all_to_all(results, splits, splits, group)
        torch.mm(gradient.t(), everywhere)
        return collectives.reduce_scatter(torch.mm(gradient, weight), group)

    return Contender(forward, step)
