"""A TARGET for `python -m autoshard compile`: a table that no laptop holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Lookup(nn.Module):
    """ids (B, 20) -> (B, 128)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(2_000_000_000, 128, mode="sum")  # 1 TB

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def build() -> tuple[nn.Module, tuple[Tensor]]:
    return Lookup(), (torch.zeros(1024, 20, dtype=torch.long),)
