"""The plain models of the matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.matrix.case import BAG, EMBEDDING, LINEAR, Case, initial_weights


class Layers(nn.Module):
    """One layer, or two linears, and perhaps a view of the output."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layer = make_layer(case)
        linears = case.op == LINEAR and case.then is not None
        self.then = nn.Linear(case.columns, case.then or 1, case.bias, dtype=case.torch_dtype) if linears else None
        self.viewed = case.viewed

    def forward(self, *arguments: Any) -> Tensor:
        out: Tensor = self.layer(*arguments)
        if self.then is not None:
            out = self.then(F.gelu(out))
        return out.view(-1) if self.viewed else out


class EmbeddingFunction(nn.Module):
    """`F.embedding` with a weight of its own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(case.rows, case.columns, dtype=case.torch_dtype))
        self.options = lookup_options(case)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, **self.options)


class BagFunction(nn.Module):
    """`F.embedding_bag` with a weight of its own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(case.rows, case.columns, dtype=case.torch_dtype))
        self.options = {
            **lookup_options(case),
            "mode": case.mode,
            "include_last_offset": case.include_last_offset,
        }

    def forward(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return F.embedding_bag(ids, self.weight, offsets, per_sample_weights=weights, **self.options)


def lookup_options(case: Case) -> dict[str, Any]:
    return {
        "padding_idx": case.padding_idx,
        "max_norm": case.max_norm,
        "norm_type": case.norm_type,
        "scale_grad_by_freq": case.scale_grad_by_freq,
        "sparse": case.sparse,
    }


def make_layer(case: Case) -> nn.Module:
    if case.op == LINEAR:
        return nn.Linear(case.rows, case.columns, case.bias, dtype=case.torch_dtype)
    if case.functional:
        return EmbeddingFunction(case) if case.op == EMBEDDING else BagFunction(case)
    if case.op == EMBEDDING:
        return nn.Embedding(case.rows, case.columns, **lookup_options(case), dtype=case.torch_dtype)
    assert case.op == BAG
    return nn.EmbeddingBag(
        case.rows,
        case.columns,
        mode=case.mode,
        include_last_offset=case.include_last_offset,
        **lookup_options(case),
        dtype=case.torch_dtype,
    )


def make_model(case: Case) -> Layers:
    """The plain model, with the weights that the oracle starts from."""
    with torch.device("meta"):
        model = Layers(case)
    state = dict(zip([name for name, _ in model.named_parameters()], initial_weights(case), strict=True))
    model.load_state_dict(state, assign=True)
    return model
