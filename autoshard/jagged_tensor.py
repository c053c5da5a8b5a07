"""Lists of ids of varying length in one tensor, for one key; and what is the same for many keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.errors import InputError, describe

_SHOWN = 8


class Jagged:
    """Consecutive lists: values (N,), lengths (L,), which add up to N, and weights (N,) or None."""

    _values: Tensor
    _lengths: Tensor
    _weights: Tensor | None

    def values(self) -> Tensor:
        """(N,)."""
        return self._values

    def lengths(self) -> Tensor:
        """(L,)."""
        return self._lengths

    def offsets(self) -> Tensor:
        """(L+1,), of the dtype of the lengths: where each list begins, and N."""
        return torch.cat([self._lengths.new_zeros(1), self._lengths.cumsum(0)]).to(self._lengths.dtype)

    def weights(self) -> Tensor:
        """(N,).

        Raises:
            InputError: if there are none.
        """
        if self._weights is None:
            raise error(type(self), "no weights", "some", "Use weights_or_none() where there may be none.")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """(N,), or None."""
        return self._weights

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device


class JaggedTensor(Jagged):
    """The lists of one key: values (N,), lengths (B,), and weights (N,) or None. A pytree node."""

    def __init__(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        self._values = values
        self._lengths = lengths
        self._weights = weights

    def to_lists(self) -> list[list[int]]:
        """The values of each sample."""
        lists: list[list[int]] = [part.tolist() for part in self._values.split(self._lengths.tolist())]
        return lists

    def __repr__(self) -> str:
        shown = f": {show(self, self.offsets().tolist())}" if is_readable(self) else ""
        return f"JaggedTensor({summary(self)}{shown})"


def error(kind: type, fact: str, expected: str, remedy: str) -> InputError:
    """An error of the class `kind`."""
    return InputError(describe(kind.__name__, fact, expected, remedy))


def is_readable(x: Jagged) -> bool:
    """False without data to show; a pytree may hold anything in the place of tensors."""
    parts = [part for part in (x._values, x._lengths, x._weights) if part is not None]
    plain = all(type(part) in (Tensor, torch.nn.Parameter) and not part.is_meta for part in parts)
    return plain and not torch.compiler.is_compiling()


def summary(x: Jagged) -> str:
    """12 values int64, weights float32"""
    parts = [part for part in (x._values, x._weights) if isinstance(part, Tensor)]
    if not parts:
        return f"values {x._values}"
    dtypes = [str(part.dtype).removeprefix("torch.") for part in parts]
    return ", weights ".join([f"{parts[0].size(0)} values {dtypes[0]}", *dtypes[1:]])


def show(x: Jagged, offsets: list[int]) -> str:
    """[1 2] [] [3], or with weights [1:0.5 2:1] [] [3:2]: the lists between these offsets."""
    texts = []
    for start, end in itertools.pairwise(offsets[: _SHOWN + 1]):
        span = slice(start, min(end, start + _SHOWN))
        ids = [str(value) for value in x._values[span].tolist()]
        if x._weights is not None:
            ids = [f"{value}:{weight:g}" for value, weight in zip(ids, x._weights[span].tolist(), strict=False)]
        texts.append(f"[{' '.join(ids)}{' ...' if end - start > _SHOWN else ''}]")
    left_out = len(offsets) - 1 - _SHOWN
    return " ".join([*texts, f"... {left_out} more"] if left_out > 0 else texts)


def with_paths(leaves: list[Any]) -> list[tuple[pytree.KeyEntry, Any]]:
    """The leaves of a pytree node, named for torch.export."""
    return list(zip(map(pytree.GetAttrKey, ("values", "lengths", "weights")), leaves, strict=True))


def _flatten(x: JaggedTensor) -> tuple[list[Any], None]:
    return [x._values, x._lengths, x._weights], None


def _flatten_with_paths(x: JaggedTensor) -> tuple[list[tuple[pytree.KeyEntry, Any]], None]:
    leaves, context = _flatten(x)
    return with_paths(leaves), context


def _unflatten(leaves: Iterable[Any], context: None) -> JaggedTensor:
    return JaggedTensor(*leaves)


pytree.register_pytree_node(
    JaggedTensor,
    _flatten,
    _unflatten,
    serialized_type_name="autoshard.JaggedTensor",
    flatten_with_keys_fn=_flatten_with_paths,
)
