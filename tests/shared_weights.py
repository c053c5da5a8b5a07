"""Models that use a weight twice, or read it beside its layer; each with the parameters that stay whole for that."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Model, dense, ids, in_equal_parts


class SharedTable(nn.Module):
    """One table for two features, a sequence and a bag: ids (B, 3) -> (B, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7, padding_idx=1)
        self.bag = nn.EmbeddingBag(11, 7, mode="mean")
        self.bag.weight = self.table.weight
        self.layer = nn.Linear(28, 5)

    def forward(self, ids: Tensor) -> Tensor:
        features = [self.table(ids[:, 0]), self.table(ids[:, 1]), self.table(ids).sum(1), self.bag(ids)]
        return self.layer(torch.cat(features, -1))


class Tied(nn.Module):
    """A lookup and a linear with one weight."""

    def __init__(self, table: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.table = table
        self.head = nn.Linear(7, 11, bias=bias)
        self.head.weight = table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids)))


class TiedLinears(nn.Module):
    """Two linears with one weight and a bias of their own, both tied to a table of as many rows as columns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)
        self.up, self.out = nn.Linear(11, 11), nn.Linear(11, 11)
        self.up.weight = self.out.weight = self.table.weight
        self.one, self.other = nn.Linear(11, 7), nn.Linear(11, 7)
        self.other.weight = self.one.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.out(torch.tanh(self.up(self.table(ids))))
        return self.one(hidden) * self.other(hidden)


class Transposed(nn.Module):
    """A linear with the weight of another, transposed: what is its feature axis is the other's input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.down = nn.Linear(7, 5)
        self.bias = nn.Parameter(torch.randn(7))

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.down(self.table(ids))), self.down.weight.t(), self.bias)


class Regularised(nn.Module):
    """The squares of a table and of a layer are added to the result."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.layer = nn.Linear(7, 5)

    def forward(self, ids: Tensor) -> Tensor:
        penalty = self.table.weight.pow(2).sum() + self.layer.weight.abs().max()
        return self.layer(self.table(ids)) + penalty


class RenormedTwice(nn.Module):
    """Rows that the second lookup scales were scaled by the first; the linear reads them as they are then."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7, max_norm=1.5, norm_type=1.0)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids) + self.table(ids.flip(1))))


class RenormedAfterUse(nn.Module):
    """The linear has kept its weight for the backward when the lookup scales rows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7, max_norm=0.5)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.head(x.requires_grad_()).sum() + self.table(ids)


class Listed(nn.Module):
    """Tables in a list and in a module that has no forward, looked up by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList(torch.randn(11, 7) for _ in range(2))
        self.holder = nn.Module()
        self.holder.weight = nn.Parameter(torch.randn(11, 7))
        self.holder.scale = nn.Parameter(torch.randn(7))

    def forward(self, ids: Tensor) -> Tensor:
        product = F.embedding(ids, self.tables[0]) * F.embedding(ids, self.tables[1])
        return (product + F.embedding(ids, self.holder.weight)) * self.holder.scale


class OwnRead(nn.Module):
    """A table under a second name, by which code that cannot be traced reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.weight = self.table.weight

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.table(ids)
        return hidden + self.weight.pow(2).sum() if scale is None else hidden * scale


class OwnListRead(nn.Module):
    """The same, with the second name in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.weights = nn.ParameterList([self.table.weight])

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.table(ids)
        return hidden + sum(w.pow(2).sum() for w in self.weights) if scale is None else hidden * scale


class SecondNameRead(nn.Module):
    """A tied weight that code which cannot be traced reads from the layer that has it second."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.head = nn.Linear(7, 11)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.head(self.table(ids)) @ self.head.weight
        return hidden if scale is None else hidden * scale


class AttentionTwice(nn.Module):
    """nn.MultiheadAttention, which reads the weight of its out_proj, and a call of out_proj itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        attended = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.attention.out_proj(attended) + F.linear(hidden, self.attention.in_proj_weight)[..., :8]


class Tower(nn.Module):
    """ids (B, 3) -> (B, 3, 11): a tied head; a layer norm and a recurrent layer, which stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.layer = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.recurrent = nn.GRU(7, 7, batch_first=True)
        self.head = nn.Linear(7, 11)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.norm(self.layer(self.table(ids))))[0])


class Penalised(nn.Module):
    """Code that asks torch for its parameters, which no reading of the source can tell from others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        penalty = torch.stack([p.pow(2).sum() for p in self.parameters()]).sum()
        return self.table(ids) + penalty if scale is None else self.table(ids) * scale


IDS = in_equal_parts(lambda rows, seed: (ids(rows, seed, 11, 3),))
_BUILDERS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "shared_table": (SharedTable, set()),
    "tied_bag": (lambda: Tied(nn.EmbeddingBag(11, 7, mode="sum", padding_idx=2)), {"head.bias"}),
    "tied_norm": (lambda: Tied(nn.Embedding(11, 7, max_norm=1.5)), {"head.bias"}),
    "tied_sparse": (lambda: Tied(nn.Embedding(11, 7, sparse=True), bias=False), set()),
    "tied_frequencies": (lambda: Tied(nn.Embedding(11, 7, scale_grad_by_freq=True)), {"head.bias"}),
    "tied_linears": (TiedLinears, {"up.bias", "out.bias"}),
    "renormed_twice": (RenormedTwice, set()),
    "listed": (Listed, set()),
    "transposed": (Transposed, {"down.weight", "down.bias"}),
    "regularised": (Regularised, {"table.weight", "layer.weight", "layer.bias"}),
    "own_read": (OwnRead, {"weight"}),
    "own_list_read": (OwnListRead, {"table.weight"}),
    "second_name_read": (SecondNameRead, {"table.weight", "head.bias"}),
}
CASES = {name: Model(build, IDS) for name, (build, _) in _BUILDERS.items()}
CASES["attention_twice"] = Model(AttentionTwice, in_equal_parts(lambda rows, seed: (dense(rows, seed, 4, 5),)))
REPLICATED = {name: replicated for name, (_, replicated) in _BUILDERS.items()}
REPLICATED["attention_twice"] = {f"attention.{name}" for name in ("in_proj_weight", "out_proj.weight", "out_proj.bias")}
TOWER = Model(Tower, IDS)
