"""A whole step of the DLRM of `examples/dlrm.py`: forward, loss, backward, SGD.

floor        the bare lookups of `tables.py`; all that is no table, compiled, on a result that is there already; the
             bare all_reduce of its gradients; SGD
autoshard    the plain model; on a GPU also compiled into CUDA graphs, whose results live until the next call
torchrec     the tables column-wise and table-wise, with fused SGD and with dense gradients; the rest in DDP
former       the tables in torch.distributed._shard, the rest in DDP
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from autoshard import autoshard
from examples.dlrm import COUNTS
from examples.dlrm import DLRM as Model
from passes.ops import collectives
from tests.benchmarks import peer_torchrec
from tests.benchmarks.contender import FLOOR, Contender, Contenders
from tests.benchmarks.tables import Tables, bare_lookups, former_tables

CUDA_GRAPHS = "autoshard CUDA graphs"


@dataclass(frozen=True)
class DLRM:
    """T, V, D, B per rank; one id per table; and where all of it is. The floor and the peers are for the CPU."""

    tables: int
    rows: int
    dim: int
    batch: int
    device: str = "cpu"

    @property
    def lookups(self) -> Tables:
        """The tables, by their sizes."""
        return Tables(self.tables, self.rows, self.dim, self.batch, ids=1, device=self.device)

    def draw(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """counts (B, 13), ids (B, T), labels (B,) of one rank."""
        generator = torch.Generator().manual_seed(2000 + rank)
        counts = torch.randn(self.batch, len(COUNTS), generator=generator)
        labels = torch.randint(0, 2, (self.batch,), generator=generator).float()
        ids = self.lookups.draw(rank).squeeze(-1).t().contiguous()
        return counts.to(self.device), ids, labels.to(self.device)

    def model(self) -> Model:
        """The whole model, the same wherever it is made."""
        with torch.random.fork_rng(), torch.device(self.device):
            torch.manual_seed(0)
            model = Model(self.rows, self.dim, self.tables)
        with torch.no_grad():
            for number, table in enumerate(model.tables):
                table.weight.copy_(self.lookups.weight(number) / self.dim)
        return model

    def reference(self, rank: int, world: int) -> Tensor:
        """(B,)."""
        del world
        counts, ids, _ = self.draw(rank)
        with torch.no_grad():
            out: Tensor = self.model()(counts, ids)
        return out

    def contenders(self, mesh: DeviceMesh) -> Contenders:
        """All that are installed."""
        made: dict[str, Callable[[], Contender]] = {
            FLOOR: lambda: _floor(self, mesh),
            "autoshard eager": lambda: _autoshard(self, mesh, lambda model: model),
            "autoshard compiled": lambda: _autoshard(self, mesh, _compiled),
            "former": lambda: _former(self, mesh),
        }
        if mesh.device_type == "cuda":
            made[CUDA_GRAPHS] = lambda: _autoshard(self, mesh, _in_cuda_graphs)
        kinds = peer_torchrec.KINDS if peer_torchrec.is_installed() else ()
        return made | {f"torchrec {kind}": functools.partial(_torchrec, self, mesh, kind) for kind in kinds}


class Rest(nn.Module):
    """All that is no table."""

    def __init__(self, sizes: DLRM) -> None:
        super().__init__()
        self.model = sizes.model()
        del self.model.tables

    def forward(self, counts: Tensor, pooled: Sequence[Tensor]) -> Tensor:
        return self.model.interact(self.model.bottom(counts), list(pooled))


def _trained(call: Callable[[], Tensor], leaves: Sequence[Tensor], labels: Tensor) -> Contender:
    optimizer = torch.optim.SGD(leaves, lr=peer_torchrec.LEARNING_RATE)

    def step() -> Tensor:
        optimizer.zero_grad()
        out = call()
        F.binary_cross_entropy_with_logits(out, labels).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        return out.detach()

    return Contender(torch.no_grad()(call), step)


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True)


def _in_cuda_graphs(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True, mode="reduce-overhead")


def _autoshard(sizes: DLRM, mesh: DeviceMesh, ready: Callable[[nn.Module], Any]) -> Contender:
    counts, ids, labels = sizes.draw(mesh.get_local_rank())
    model = autoshard(sizes.model(), mesh, "paired", example_inputs=(counts, ids))
    run = ready(model)
    return _trained(lambda: run(counts, ids), list(model.parameters()), labels)


def _torchrec(sizes: DLRM, mesh: DeviceMesh, kind: str) -> Contender:
    counts, ids, labels = sizes.draw(mesh.get_local_rank())
    tables = peer_torchrec.sharded(sizes.lookups, mesh, kind)
    with torch.no_grad():
        for value in tables.state_dict().values():
            for shard in value.local_shards():
                shard.tensor.div_(sizes.dim)
    rest = DistributedDataParallel(Rest(sizes), process_group=mesh.get_group())
    values, keys = ids.t().flatten(), peer_torchrec.keys(sizes.lookups)

    def call() -> Tensor:
        pooled = tables(peer_torchrec.batch(sizes.lookups, values)).to_dict()
        out: Tensor = rest(counts, [pooled[key] for key in keys])
        return out

    return _trained(call, [*tables.parameters(), *rest.parameters()], labels)


def _former(sizes: DLRM, mesh: DeviceMesh) -> Contender:
    counts, ids, labels = sizes.draw(mesh.get_local_rank())
    weights = [holder.weight for holder in former_tables(sizes.lookups, mesh)]
    locals_ = [weight.local_tensor() for weight in weights]
    with torch.no_grad():
        for local in locals_:
            local.div_(sizes.dim)
    rest = DistributedDataParallel(Rest(sizes), process_group=mesh.get_group())

    def call() -> Tensor:
        pooled = [F.embedding_bag(ids[:, n : n + 1], weight, mode="sum") for n, weight in enumerate(weights)]
        out: Tensor = rest(counts, pooled)
        return out

    return _trained(call, [*locals_, *rest.parameters()], labels)


def _floor(sizes: DLRM, mesh: DeviceMesh) -> Contender:
    counts, ids, labels = sizes.draw(mesh.get_local_rank())
    bare, stack = bare_lookups(sizes.lookups, ids.t().contiguous(), mesh)
    rest, group = Rest(sizes), str(mesh.get_group().group_name)
    run: Any = torch.compile(rest, fullgraph=True)
    pooled = [torch.randn(sizes.batch, sizes.dim).requires_grad_() for _ in range(sizes.tables)]
    optimizer = torch.optim.SGD([stack, *rest.parameters()], lr=peer_torchrec.LEARNING_RATE)
    gradients = torch.zeros(sum(p.numel() for p in rest.parameters()))

    @torch.no_grad()
    def forward() -> Tensor:
        bare.forward()
        out: Tensor = run(counts, pooled)
        return out

    def step() -> Tensor:
        for x in (*pooled, *rest.parameters()):
            x.grad = None
        bare.step()
        out: Tensor = run(counts, pooled)
        F.binary_cross_entropy_with_logits(out, labels).backward()  # type: ignore[no-untyped-call]  # as above
        collectives.all_reduce(gradients, group)
        optimizer.step()
        return out.detach()

    return Contender(forward, step)
