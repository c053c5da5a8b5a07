"""TorchRec's EmbeddingBagCollection on the tables of a workload."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.benchmarks.contender import Contender, differentiated

if TYPE_CHECKING:
    from tests.benchmarks.tables import Tables

LEARNING_RATE = 0.01
KINDS = [f"{sharding} {kernel}" for sharding in ("column-wise", "table-wise") for kernel in ("fused", "dense")]


def is_installed() -> bool:
    """True if there is a TorchRec."""
    return importlib.util.find_spec("torchrec") is not None


def lookups(sizes: Tables, ids: Tensor, mesh: DeviceMesh) -> dict[str, Callable[[], Contender]]:
    """Column-wise and table-wise, fused and dense; none where TorchRec is not installed."""

    def build(kind: str) -> Contender:
        module = sharded(sizes, mesh, kind)
        values = ids.flatten()

        def call() -> Tensor:
            out: Tensor = module(batch(sizes, values)).values()
            return out

        names = list(module(batch(sizes, values)).keys())
        places = [names.index(name) for name in keys(sizes)]
        return differentiated(
            call,
            list(module.parameters()),
            lambda result: result.view(-1, sizes.tables, sizes.dim)[:, places].flatten(1),
        )

    return {f"torchrec {kind}": lambda kind=kind: build(kind) for kind in KINDS} if is_installed() else {}  # type: ignore[misc]  # the default argument binds `kind`


def keys(sizes: Tables) -> list[str]:
    """The features' names."""
    return [f"f{number}" for number in range(sizes.tables)]


def batch(sizes: Tables, values: Tensor) -> Any:
    """The KeyedJaggedTensor of (T*B*L,) ids. A fresh one for each step: it keeps its sums of lengths."""
    import torchrec

    lengths = torch.full((sizes.tables * sizes.batch,), sizes.ids)
    return torchrec.KeyedJaggedTensor.from_lengths_sync(keys=keys(sizes), values=values, lengths=lengths)


def sharded(sizes: Tables, mesh: DeviceMesh, kind: str) -> nn.Module:
    """The sharded collection, with the workload's weights. Collective."""
    import torchrec
    from torchrec.distributed import ShardingEnv
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, table_wise

    sharding, kernel = kind.split()
    world = mesh.size()
    configs = [
        torchrec.EmbeddingBagConfig(
            name=f"t{number}", embedding_dim=sizes.dim, num_embeddings=sizes.rows, feature_names=[key]
        )
        for number, key in enumerate(keys(sizes))
    ]
    collection = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    sharder = EmbeddingBagCollectionSharder({"learning_rate": LEARNING_RATE} if kernel == "fused" else None)
    made: dict[str, Any] = {
        config.name: column_wise(list(range(world)), compute_kernel=kernel)
        if sharding == "column-wise"
        else table_wise(number % world, compute_kernel=kernel)
        for number, config in enumerate(configs)
    }
    plan = construct_module_sharding_plan(
        collection, made, sharder=sharder, world_size=world, local_size=world, device_type="cpu"
    )
    env = ShardingEnv.from_process_group(mesh.get_group())
    module: nn.Module = sharder.shard(collection, plan, env, torch.device("cpu"))
    with torch.no_grad():
        for number, value in enumerate(module.state_dict().values()):
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.copy_(sizes.weight(number)[row : row + rows, column : column + columns])
    return module
