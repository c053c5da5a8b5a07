"""What one process computes on the concatenation of all ranks' batches, with `torch.nn.functional` and whole weights.

Nothing here knows the product. Two things keep clear of what torch's own CPU op does not have: `include_last_offset`
cannot be concatenated, so it is written out as offsets; and a bag whose offsets are empty is never computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.matrix.case import BAG, EMBEDDING, LINEAR, Batch, Case, initial_weights


@dataclass(frozen=True)
class Expected:
    """One step. Lists are by rank; `gradients` and `weights` are whole, by parameter.

    Attributes:
        outputs: of the model.
        input_gradients: of a linear's input, or of per_sample_weights; None where there is none.
        renormed: the parameters as the forward left them (max_norm changes them).
        gradients: of the parameters.
        weights: the parameters after the optimizer's step.
    """

    outputs: list[Tensor]
    input_gradients: list[Tensor | None]
    renormed: list[Tensor]
    gradients: list[Tensor]
    weights: list[Tensor]


class Oracle:
    """The model of a case in one process."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.parameters = [torch.nn.Parameter(weight) for weight in initial_weights(case)]
        self.optimizer = make_optimizer(case, self.parameters)

    def step(self, batches: list[Batch]) -> Expected:
        """One forward, backward and optimizer step on the batches of all ranks."""
        case = self.case
        distinct = batches[:1] if case.replicated else batches
        inputs = [_leaf(batch, case) for batch in distinct]
        out = self._forward(distinct, inputs)
        renormed = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer.zero_grad()
        gradient = torch.cat([batch.gradient.reshape(-1) for batch in distinct]).view(out.shape)
        out.backward(gradient)
        if case.gradients == "mean" and not case.replicated:
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter.grad = parameter.grad / case.world
        gradients = [_dense(parameter.grad) for parameter in self.parameters]
        self.optimizer.step()
        pieces = out.detach().view(-1).split([batch.gradient.numel() for batch in distinct])
        outputs = [piece.view(batch.gradient.shape) for piece, batch in zip(pieces, distinct, strict=True)]
        input_gradients = [None if leaf is None else leaf.grad for leaf in inputs]
        copies = case.world if case.replicated else 1
        weights = [parameter.detach().clone() for parameter in self.parameters]
        return Expected(outputs * copies, input_gradients * copies, renormed, gradients, weights)

    def _forward(self, batches: list[Batch], leaves: list[Tensor | None]) -> Tensor:
        case, parameters = self.case, self.parameters
        if case.op == LINEAR:
            x = torch.cat([leaf.reshape(-1, case.rows) for leaf in leaves if leaf is not None])
            weights, biases = (parameters[::2], parameters[1::2]) if case.bias else (parameters, [])
            for number, weight in enumerate(weights):
                x = F.linear(F.gelu(x) if number else x, weight, biases[number] if biases else None)
            return x
        ids = [batch.input.long() for batch in batches]
        if case.op == EMBEDDING:
            return F.embedding(torch.cat([i.flatten() for i in ids]), parameters[0], **self._options())
        assert case.op == BAG
        per_sample: list[Tensor] = [leaf for leaf in leaves if leaf is not None]
        if all(batch.offsets is None for batch in batches):
            return self._bags(self._joined(ids), None, self._joined(per_sample) if per_sample else None)
        renormed = case.tail > 0 and case.max_norm is not None
        if renormed:  # torch renorms the rows of the ids that it then leaves out, too
            with torch.no_grad():
                torch.embedding_renorm_(self.parameters[0].detach(), torch.cat(ids), case.max_norm, case.norm_type)
        offsets, base = [], 0
        for place, batch in enumerate(batches):
            assert batch.offsets is not None
            starts = batch.offsets.long()
            if case.include_last_offset:
                end = int(starts[-1])
                starts, ids[place] = starts[:-1], ids[place][:end]
                if per_sample:
                    per_sample[place] = per_sample[place][:end]
            offsets.append(starts + base)
            base += ids[place].numel()
        weights = self._joined(per_sample) if per_sample else None
        return self._bags(self._joined(ids), torch.cat(offsets), weights, **({"max_norm": None} if renormed else {}))

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Behind one another; a replicated one keeps its strides, which decide what CPU kernel torch takes."""
        return parts[0] if self.case.replicated else torch.cat(parts)

    def _bags(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, **changed: None) -> Tensor:
        table = self.parameters[0]
        if (ids.size(0) if offsets is None else offsets.numel()) == 0:
            return table[:0] + 0
        options = self._options() | changed
        return F.embedding_bag(ids, table, offsets, mode=self.case.mode, per_sample_weights=weights, **options)

    def _options(self) -> dict[str, object]:
        case = self.case
        return {
            "padding_idx": case.padding_idx,
            "max_norm": case.max_norm,
            "norm_type": case.norm_type,
            "scale_grad_by_freq": case.scale_grad_by_freq,
            "sparse": case.sparse,
        }


def make_optimizer(case: Case, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a case.

    A learning rate that is a power of two makes SGD's step one rounding, whether or not the kernel fuses it.
    """
    match case.optimizer:
        case "adam":
            return torch.optim.Adam(parameters, lr=0.125, eps=0.125)
        case "sparse_adam":
            return torch.optim.SparseAdam(parameters, lr=0.125, eps=0.125)
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=0.125, eps=0.125)
    assert case.optimizer == "sgd"
    return torch.optim.SGD(parameters, lr=0.125)


def _leaf(batch: Batch, case: Case) -> Tensor | None:
    """The operand that gets a gradient, as a leaf of its own."""
    operand = batch.input if case.op == LINEAR else batch.weights
    return None if operand is None else operand.detach().requires_grad_()


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()
