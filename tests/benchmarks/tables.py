"""Lookups alone: T tables (V, D), L ids in each of B bags per rank, pooled by sum; what comes out is (B, T*D).

floor                    one lookup of stacked shards, and the bare collectives on the same bytes: nothing is packed or
                         rearranged, nothing computed is sent
by hand                  one int32 gather, a lookup per table, one all_to_all, columns put in order
stacked by hand          the same with the tables of a rank in one tensor, and one lookup
autoshard                the plain model
torchrec                 the same tables column-wise and table-wise, with fused SGD and with dense gradients
former                   torch.distributed._shard, what PyTorch had before
dtensor                  columns in DTensors: one int64 gather, embedding and sum for want of embedding_bag, one
                         redistribution
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autoshard import autoshard
from passes.ops import collectives
from tests.benchmarks import peer_torchrec
from tests.benchmarks.contender import FLOOR, Contender, Contenders, differentiated, eager_and_compiled


@dataclass(frozen=True)
class Tables:
    """T, V, D, B per rank, L; and where ids and tables are. The floor and the peers are for the CPU."""

    tables: int
    rows: int
    dim: int
    batch: int
    ids: int
    device: str = "cpu"

    def draw(self, rank: int) -> Tensor:
        """The ids of one rank: (T, B, L)."""
        generator = torch.Generator().manual_seed(1000 + rank)
        return torch.randint(0, self.rows, (self.tables, self.batch, self.ids), generator=generator).to(self.device)

    def weight(self, number: int) -> Tensor:
        """A table: (V, D)."""
        generator = torch.Generator(self.device).manual_seed(number)
        return torch.randn(self.rows, self.dim, generator=generator, device=self.device)

    def reference(self, rank: int, world: int) -> Tensor:
        """(B, T*D)."""
        del world
        ids = self.draw(rank)
        return torch.cat([F.embedding_bag(ids[n], self.weight(n), mode="sum") for n in range(self.tables)], 1)

    def contenders(self, mesh: DeviceMesh) -> Contenders:
        """All that are installed."""
        ids = self.draw(mesh.get_local_rank())
        return {
            FLOOR: lambda: bare_lookups(self, ids, mesh)[0],
            **eager_and_compiled("by hand", lambda: ByHand(self, mesh), ids),
            **eager_and_compiled("stacked by hand", lambda: StackedByHand(self, mesh), ids),
            **eager_and_compiled("autoshard", lambda: autoshard(Plain(self), mesh, "paired"), ids),
            **peer_torchrec.lookups(self, ids, mesh),
            "former": lambda: _former(self, ids, mesh),
            **eager_and_compiled("dtensor", lambda: OfDTensors(self, mesh), ids),
        }


class Plain(nn.Module):
    """ids (T, B, L) -> (B, T*D)."""

    def __init__(self, sizes: Tables) -> None:
        super().__init__()
        weights = (sizes.weight(number) for number in range(sizes.tables))
        self.tables = nn.ModuleList(nn.EmbeddingBag.from_pretrained(w, freeze=False, mode="sum") for w in weights)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([table(ids[number]) for number, table in enumerate(self.tables)], 1)


class ByHand(nn.Module):
    """What one would write for these sizes, with a lookup per table. W must divide D."""

    def __init__(self, sizes: Tables, mesh: DeviceMesh) -> None:
        super().__init__()
        self.sizes, self.world, self.group = sizes, mesh.size(), mesh.get_group()
        self.columns = own_columns(sizes, mesh)
        self.shards = nn.ParameterList(_shard(sizes, number, mesh) for number in range(sizes.tables))

    def forward(self, ids: Tensor) -> Tensor:
        sizes = self.sizes
        gathered = functional.all_gather_tensor(ids.int().flatten(), 0, self.group)
        by_table = gathered.view(self.world, *ids.shape).transpose(0, 1).reshape(sizes.tables, -1, sizes.ids)
        found = [F.embedding_bag(by_table[n], shard, mode="sum") for n, shard in enumerate(self.shards)]
        return self.exchange(torch.cat([x.view(self.world, -1) for x in found], 1))

    def exchange(self, packed: Tensor) -> Tensor:
        """(W, T*B*d), by destination -> (B, T*D)."""
        sizes, splits = self.sizes, [packed.size(1)] * self.world
        came = functional.all_to_all_single(packed.flatten(), splits, splits, self.group)
        blocks = came.view(self.world, sizes.tables, sizes.batch, self.columns)
        return blocks.permute(2, 1, 0, 3).reshape(sizes.batch, sizes.tables * sizes.dim)


class StackedByHand(ByHand):
    """With one lookup. The ids come ordered by rank, table and bag, as the results have to leave."""

    def __init__(self, sizes: Tables, mesh: DeviceMesh) -> None:
        super().__init__(sizes, mesh)
        self.stack = nn.Parameter(torch.cat([shard.detach() for shard in self.shards]))
        del self.shards
        self.register_buffer("offsets", torch.arange(sizes.tables, dtype=torch.int32)[:, None, None] * sizes.rows)

    def forward(self, ids: Tensor) -> Tensor:
        stacked = ids.int() + self.offsets
        gathered = functional.all_gather_tensor(stacked.flatten(), 0, self.group)
        found = F.embedding_bag(gathered.view(-1, self.sizes.ids), self.stack, mode="sum")
        return self.exchange(found.view(self.world, -1))


class OfDTensors(nn.Module):
    """Every table a DTensor with its columns sharded."""

    def __init__(self, sizes: Tables, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.tables = nn.ParameterList(
            distribute_tensor(sizes.weight(number), mesh, [Shard(1)]) for number in range(sizes.tables)
        )

    def forward(self, ids: Tensor) -> Tensor:
        everywhere = DTensor.from_local(ids, self.mesh, [Shard(1)], run_check=False).redistribute(
            placements=[Replicate()]
        )
        pooled = [F.embedding(everywhere[number], table).sum(1) for number, table in enumerate(self.tables)]
        return torch.stack(pooled, 1).redistribute(placements=[Shard(0)]).to_local().flatten(1)


def own_columns(sizes: Tables, mesh: DeviceMesh) -> int:
    """d = D / W."""
    if sizes.dim % mesh.size():
        raise SystemExit(f"{sizes.dim} columns over {mesh.size()} ranks: what is written by hand wants equal parts")
    return sizes.dim // mesh.size()


def _shard(sizes: Tables, number: int, mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(sizes.weight(number).chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous())


def bare_lookups(sizes: Tables, ids: Tensor, mesh: DeviceMesh) -> tuple[Contender, Tensor]:
    """What cannot be saved, and the stack; the step sends the results' gradient, and makes that of the stack."""
    group, columns = str(mesh.get_group().group_name), own_columns(sizes, mesh)
    rows = sizes.tables * sizes.rows
    shards = torch.randn(rows, columns, requires_grad=True)
    bags = sizes.tables * mesh.size() * sizes.batch
    everywhere, narrow = torch.randint(0, rows, (bags, sizes.ids)).int(), ids.int()
    results = torch.randn(bags * columns)
    splits = [results.numel() // mesh.size()] * mesh.size()

    def forward() -> Tensor:
        collectives.all_gather(narrow, group)
        F.embedding_bag(everywhere, shards, mode="sum")
        return collectives.all_to_all(results, splits, splits, group)

    def step() -> Tensor:
        shards.grad = None
        collectives.all_gather(narrow, group)
        found = F.embedding_bag(everywhere, shards, mode="sum")
        collectives.all_to_all(results, splits, splits, group)
        gradient = collectives.all_to_all(results, splits, splits, group)
        found.backward(gradient.view_as(found))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return gradient

    return Contender(torch.no_grad()(forward), step), shards


def former_tables(sizes: Tables, mesh: DeviceMesh) -> nn.ModuleList:
    """A module for each table, whose `weight` is a ShardedTensor of the former implementation."""
    from torch.distributed._shard import shard_parameter
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    ranks = dist.get_process_group_ranks(mesh.get_group())
    spec = ChunkShardingSpec(dim=1, placements=[f"rank:{rank}/cpu" for rank in ranks])
    holders = nn.ModuleList(nn.Module() for _ in range(sizes.tables))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        for number, holder in enumerate(holders):
            holder.weight = nn.Parameter(sizes.weight(number))
            shard_parameter(holder, "weight", spec, process_group=mesh.get_group())
    return holders


def _former(sizes: Tables, ids: Tensor, mesh: DeviceMesh) -> Contender:
    weights = [holder.weight for holder in former_tables(sizes, mesh)]

    def call() -> Tensor:
        return torch.cat([F.embedding_bag(ids[n], weight, mode="sum") for n, weight in enumerate(weights)], 1)

    return differentiated(call, [weight.local_tensor() for weight in weights])
