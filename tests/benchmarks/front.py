"""The lookups of a DLRM: T tables (V, D), L ids in each of B bags per rank, pooled by sum; what comes out is (B, T*D).

floor            one lookup of stacked shards, and the bare collectives on the same bytes: nothing packed or rearranged
by hand          one int32 gather, a lookup per table, one all_to_all, columns put in order
autoshard        the plain model, eager and compiled
torchrec         the same tables column-wise, with fused and with dense gradients, where TorchRec is installed
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import autoshard
from passes.ops import collectives


@dataclass(frozen=True)
class Front:
    """T, V, D, B per rank, L."""

    tables: int = 26
    rows: int = 20_000
    dim: int = 64
    batch: int = 1024
    ids: int = 4

    def draw(self, rank: int) -> Tensor:
        """The ids of one rank: (T, B, L)."""
        generator = torch.Generator().manual_seed(1000 + rank)
        return torch.randint(0, self.rows, (self.tables, self.batch, self.ids), generator=generator)


class Model(nn.Module):
    """ids (T, B, L) -> (B, T*D)."""

    def __init__(self, front: Front) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(front.rows, front.dim, mode="sum") for _ in range(front.tables))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([table(ids[number]) for number, table in enumerate(self.tables)], 1)


Contenders = dict[str, Callable[[], object]]


def contenders(front: Front) -> tuple[Contenders, Contenders]:
    """What runs forward without a gradient, and what runs forward and backward. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = front.draw(rank)
    up = torch.ones(front.batch, front.tables * front.dim)
    forward: Contenders = {"floor": _floor(front, ids, world), "by hand": _by_hand(front, ids, world)}
    step: Contenders = {}
    for name, compiled in (("autoshard eager", False), ("autoshard compiled", True)):
        torch.manual_seed(0)
        model: Any = autoshard(Model(front), init_device_mesh("cpu", (world,)))
        run = torch.compile(model, fullgraph=True) if compiled else model
        forward[name] = _forward(lambda run=run: run(ids))  # type: ignore[misc]  # the default argument binds `run`
        step[name] = _step(model, lambda run=run: run(ids), up)  # type: ignore[misc]  # as above
    if importlib.util.find_spec("torchrec") is not None:
        for kernel in ("fused", "dense"):
            module, call = _torchrec(front, ids, world, kernel)
            forward[f"torchrec {kernel}"] = _forward(call)
            step[f"torchrec {kernel}"] = _step(module, call, up)
    return forward, step


def _forward(call: Callable[[], object]) -> Callable[[], object]:
    return torch.no_grad()(call)


def _step(model: nn.Module, call: Callable[[], Tensor], up: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        call().backward(up)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    return step


def _floor(front: Front, ids: Tensor, world: int) -> Callable[[], object]:
    group, columns = _group(), front.dim // world
    shards = torch.randn(front.tables * front.rows, columns)
    everywhere = torch.randint(0, front.tables * front.rows, (front.tables * world * front.batch, front.ids)).int()
    narrow = ids.int()
    results = torch.randn(world, front.batch * front.tables * columns)
    splits = [results.size(1)] * world

    @torch.no_grad()
    def run() -> None:
        collectives.all_gather(narrow, group)
        F.embedding_bag(everywhere, shards, mode="sum")
        collectives.all_to_all(results.flatten(), splits, splits, group)

    return run


def _by_hand(front: Front, ids: Tensor, world: int) -> Callable[[], object]:
    group, columns = _group(), front.dim // world
    shards = [torch.randn(front.rows, columns) for _ in range(front.tables)]
    splits = [front.batch * front.tables * columns] * world

    @torch.no_grad()
    def run() -> Tensor:
        gathered = collectives.all_gather(ids.int().flatten(), group).view(world, front.tables, front.batch, front.ids)
        by_table = gathered.transpose(0, 1).reshape(front.tables, world * front.batch, front.ids)
        found = [F.embedding_bag(by_table[n], shard, mode="sum") for n, shard in enumerate(shards)]
        packed = torch.cat([x.view(world, front.batch * columns) for x in found], 1)
        came = collectives.all_to_all(packed.flatten(), splits, splits, group)
        blocks = came.view(world, front.tables, front.batch, columns)
        return blocks.permute(2, 1, 0, 3).reshape(front.batch, front.tables * front.dim)

    return run


def _group() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]  # the group is there


def _torchrec(front: Front, ids: Tensor, world: int, kernel: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """TorchRec's EmbeddingBagCollection, every table column-wise over all ranks, and its call on a fresh input.

    A KeyedJaggedTensor keeps its sums of lengths; a new batch has to compute them again.
    """
    import torchrec
    from torchrec.distributed import ShardingEnv
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan

    keys = [f"f{number}" for number in range(front.tables)]
    lengths = torch.full((front.tables * front.batch,), front.ids)
    configs = [
        torchrec.EmbeddingBagConfig(
            name=f"t{number}", embedding_dim=front.dim, num_embeddings=front.rows, feature_names=[key]
        )
        for number, key in enumerate(keys)
    ]
    collection = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.01} if kernel == "fused" else None)
    sharding = {config.name: column_wise(list(range(world)), compute_kernel=kernel) for config in configs}
    plan = construct_module_sharding_plan(
        collection, sharding, sharder=sharder, world_size=world, local_size=world, device_type="cpu"
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    module = sharder.shard(collection, plan, env, torch.device("cpu"))
    values = ids.flatten()

    def call() -> Tensor:
        batch = torchrec.KeyedJaggedTensor.from_lengths_sync(keys=keys, values=values, lengths=lengths)
        out: Tensor = module(batch).values()
        return out

    return module, call
