"""Jagged features: for each key a batch of lists of ids of varying length.

What TorchRec's class of the same name holds, with its method names, on plain torch: no compiled operators, and nothing
is cached, so that no tensor disagrees with what was derived from it.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoshard.jagged_tensor import Jagged, JaggedTensor, error, is_readable, show, summary, with_paths
from passes.errors import InputError
from passes.ops.jagged import segment_index, segment_sums

_SHOWN_KEYS = 16

Strides = tuple[tuple[int, ...], ...]


class KeyedJaggedTensor(Jagged):
    """For each of F keys a batch of B lists of ids, stored key-major.

                 sample 0     sample 1    sample 2
        "A"      [7 8]        []          [9]
        "B"      [3]          [4]         [5 6 7]

        values   7 8 9 3 4 5 6 7        lengths   2 0 1 1 1 3        offsets   0 2 2 3 4 5 8

    Args:
        keys: F names. One may stand twice, but is then reached by place only (`split`, `permute`).
        values: (N,).
        weights: (N,), or None.
        lengths: (F*B,) or (F, B), int32 or int64; they add up to N.
        offsets: (F*B+1,), in place of lengths: from 0 to N, ascending.
        stride: B, needed only where there are no keys.
        stride_per_key_per_rank: for keys with batches of their own: for each key the samples of each rank that they
            came from, one number where they came from no other rank.

    Raises:
        InputError: in eager mode, if these do not fit together. What takes a look into the tensors (do the lengths add
            up to N?) is checked where they travel.

    A pytree node with values, lengths and weights as leaves. torch.compile takes it as input and as output.
    """

    _keys: tuple[str, ...]
    # Only where there are no keys; otherwise the lengths tell.
    _stride: int | None
    _strides: Strides | None

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if lengths is None and offsets is not None:
            lengths = torch.diff(offsets)
        elif lengths is None or offsets is not None:
            raise _error("both or none of lengths and offsets", "one of the two", "The one follows from the other.")
        self._keys = tuple(keys)
        self._values = values
        self._lengths = lengths.flatten()
        self._weights = weights
        self._strides = None
        if stride_per_key_per_rank is not None:
            self._strides = tuple(tuple(by_rank) for by_rank in stride_per_key_per_rank)
        self._stride = None if self._keys or self._strides is not None else stride or 0
        if not torch.compiler.is_compiling():
            self._check(keys, offsets, stride)

    def _check(self, keys: Sequence[str], offsets: Tensor | None, stride: int | None) -> None:
        values, lengths, weights = self._values, self._lengths, self._weights
        if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
            raise _error(f"keys {keys!r}", "a sequence of strings", "Give a list of names.")
        if values.dim() != 1:
            raise _error(f"values of shape {tuple(values.shape)}", "one dimension", "Put all ids in one row.")
        if lengths.dtype not in (torch.int32, torch.int64):
            raise _error(f"lengths or offsets of {lengths.dtype}", "torch.int32 or torch.int64", "Convert them.")
        if offsets is not None and (offsets.dim() != 1 or offsets.size(0) == 0):
            raise _error(f"offsets of shape {tuple(offsets.shape)}", "one dimension, a 0 first", "Prepend the 0.")
        if weights is not None and weights.shape != values.shape:
            expected = f"{tuple(values.shape)}, the shape of the values"
            raise _error(f"weights of shape {tuple(weights.shape)}", expected, "Give each value one weight.")
        num_keys, num_lengths = len(self._keys), lengths.size(0)
        if self._strides is not None:
            fits = len(self._strides) == num_keys and num_lengths == sum(self.stride_per_key())
            expected = f"{sum(self.stride_per_key())}, in {num_keys} batches of {self.stride_per_key()}"
        elif stride is not None:
            fits, expected = num_lengths == num_keys * stride, f"{num_keys} keys times a stride of {stride}"
        else:
            fits = num_lengths % num_keys == 0 if num_keys else num_lengths == 0
            expected = f"a multiple of {num_keys}, the number of keys"
        if not fits:
            raise _error(f"{num_lengths} lengths", expected, "Give a length for each sample of each key.")

    @classmethod
    def _of(
        cls,
        keys: tuple[str, ...],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        stride: int | None,
        strides: Strides | None,
    ) -> KeyedJaggedTensor:
        """Without checks: sizes may be unbacked ones, and a pytree may hold anything.

        The stride is left out where there are keys or strides.
        """
        new = cls.__new__(cls)
        new._keys, new._values, new._lengths, new._weights = keys, values, lengths, weights
        new._stride = None if keys or strides is not None else stride
        new._strides = strides
        return new

    @classmethod
    def from_lengths(
        cls, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None, **strides: Any
    ) -> KeyedJaggedTensor:
        """As the constructor, which also says what `strides` may be."""
        return cls(keys, values, weights, lengths=lengths, **strides)

    @classmethod
    def from_offsets(
        cls, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None, **strides: Any
    ) -> KeyedJaggedTensor:
        """As the constructor, which also says what `strides` may be."""
        return cls(keys, values, weights, offsets=offsets, **strides)

    @classmethod
    def from_lists(
        cls,
        keys: Sequence[str],
        lists: Sequence[Sequence[Sequence[int]]],
        weights: Sequence[Sequence[Sequence[float]]] | None = None,
    ) -> KeyedJaggedTensor:
        """For each key a batch of lists of ids, and weights in the same form.

            KeyedJaggedTensor.from_lists(["A", "B"], [[[7, 8], [], [9]], [[3], [4], [5, 6, 7]]])

        Values and lengths become int64, weights float32. Batches of different size become strides per key.

        Raises:
            InputError: if there is not one batch for each key, or the weights have another form.
        """
        form = [[len(sample) for sample in batch] for batch in lists]
        if len(lists) != len(keys):
            raise _error(f"{len(lists)} batches", f"{len(keys)}, one for each key", "A batch may be empty: [].")
        if weights is not None and [[len(sample) for sample in batch] for batch in weights] != form:
            raise _error("weights in another form than the ids", "a weight for each id", "Nest them alike.")
        values = [value for batch in lists for sample in batch for value in sample]
        flat_weights = [weight for batch in weights or () for sample in batch for weight in sample]
        strides = [len(batch) for batch in lists]
        return cls(
            keys,
            torch.tensor(values, dtype=torch.int64),
            None if weights is None else torch.tensor(flat_weights, dtype=torch.float32),
            torch.tensor([length for batch in form for length in batch], dtype=torch.int64),
            stride_per_key_per_rank=[[stride] for stride in strides] if len(set(strides)) > 1 else None,
        )

    @classmethod
    def from_torchrec(cls, other: Any) -> KeyedJaggedTensor:
        """TorchRec's KeyedJaggedTensor as one of these, with the same tensors.

        Raises:
            InputError: if it has inverse indices, which have no place here.
        """
        if other.inverse_indices_or_none() is not None:
            raise _error("a TorchRec tensor with inverse indices", "one without", "Expand it before the conversion.")
        strides = other.stride_per_key_per_rank() if other.variable_stride_per_key() else None
        stride = other.stride() if strides is None else None
        return cls(other.keys(), other.values(), other.weights_or_none(), other.lengths(), None, stride, strides)

    def to_torchrec(self) -> Any:
        """TorchRec's KeyedJaggedTensor with the same tensors. Imports TorchRec."""
        if self._strides is None:
            strides: dict[str, Any] = {"stride": self.stride()}
        else:
            strides = {"stride_per_key_per_rank": self.stride_per_key_per_rank()}
        return importlib.import_module("torchrec").KeyedJaggedTensor(
            self.keys(), self._values, self._weights, self._lengths, **strides
        )

    @staticmethod
    def concat(tensors: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The keys of all, one tensor after the other.

        Raises:
            InputError: if there is none, if only some have weights or strides per key, or, in eager mode, if the
                strides differ.
        """
        if not tensors:
            raise _error("no tensor to concatenate", "at least one", "Leave it out.")
        weights = [x._weights for x in tensors if x._weights is not None]
        strides = [x._strides for x in tensors if x._strides is not None]
        for what, some in (("weights", weights), ("strides per key", strides)):
            if len(some) not in (0, len(tensors)):
                raise _error(f"{what} in {len(some)} of {len(tensors)} tensors", "all or none", "Give them to all.")
        # The compiler may know no stride; it also makes a constant of what it is asked about.
        if not strides and not torch.compiler.is_compiling() and len({x.stride() for x in tensors}) > 1:
            raise _error(f"strides {[x.stride() for x in tensors]}", "one stride", "Give them strides per key.")
        return KeyedJaggedTensor._of(
            tuple(key for x in tensors for key in x._keys),
            torch.cat([x._values for x in tensors]),
            torch.cat([x._lengths for x in tensors]),
            torch.cat(weights) if weights else None,
            tensors[0]._stride,
            tuple(by_rank for of_one in strides for by_rank in of_one) if strides else None,
        )

    def keys(self) -> list[str]:
        """The F keys."""
        return list(self._keys)

    def variable_stride_per_key(self) -> bool:
        """Whether each key has a batch of its own."""
        return self._strides is not None

    def stride(self) -> int:
        """B.

        Raises:
            InputError: if each key has a batch of its own.
        """
        if self._strides is not None:
            raise _error("a batch for each key", "one for all of them", "Use stride_per_key().")
        return self._lengths.size(0) // len(self._keys) if self._stride is None else self._stride

    def stride_per_key(self) -> list[int]:
        """The samples of each key."""
        if self._strides is not None:
            return [sum(by_rank) for by_rank in self._strides]
        return [self.stride()] * len(self._keys)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """For each key the samples of each rank that they came from; empty where all keys share a stride."""
        return [list(by_rank) for by_rank in self._strides or ()]

    def length_per_key(self) -> list[int]:
        """The number of values of each key. A host synchronisation."""
        strides = torch.tensor(self.stride_per_key(), dtype=torch.int64, device=self._lengths.device)
        with torch._dynamo.patch_dynamo_config(capture_scalar_outputs=True):
            counts: list[int] = segment_sums(self._lengths, strides).tolist()
        if torch.compiler.is_compiling():
            for count in counts:
                torch._check(count >= 0)
            torch._check(sum(counts) == self._values.size(0))
        return counts

    def to_dict(self) -> dict[str, JaggedTensor]:
        """key -> its lists. A host synchronisation.

        Raises:
            InputError: if a key stands twice.
        """
        places = [self._place(key) for key in self._keys]
        by_key = self._by_key()
        return {key: by_key[place] for key, place in zip(self._keys, places, strict=True)}

    def __getitem__(self, key: str) -> JaggedTensor:
        """The lists of one key. A host synchronisation.

        Raises:
            KeyError: if there is no such key.
            InputError: if it stands twice.
        """
        return self._by_key()[self._place(key)]

    def _place(self, key: str) -> int:
        if key not in self._keys:
            raise KeyError(key)
        if self._keys.count(key) > 1:
            raise _error(f"the key {key!r} stands {self._keys.count(key)} times", "once", "Use split() or permute().")
        return self._keys.index(key)

    def _by_key(self) -> list[JaggedTensor]:
        return [JaggedTensor(x._values, x._lengths, x._weights) for x in self.split([1] * len(self._keys))]

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Consecutive keys, segments[i] of them in the i-th tensor. A host synchronisation.

        Raises:
            InputError: if the segments do not add up to the keys.
        """
        if sum(segments) != len(self._keys) or any(count < 0 for count in segments):
            raise _error(f"segments {list(segments)}", f"a partition of {len(self._keys)} keys", "Correct them.")
        ends = list(itertools.accumulate(segments))
        spans = [slice(end - count, end) for count, end in zip(segments, ends, strict=True)]
        counts, strides = self.length_per_key(), self.stride_per_key()
        num_values = [sum(counts[span]) for span in spans]
        values = self._values.split(num_values)
        weights = [None] * len(spans) if self._weights is None else self._weights.split(num_values)
        lengths = self._lengths.split([sum(strides[span]) for span in spans])
        stride = None if self._strides is not None else self.stride()
        return [
            KeyedJaggedTensor._of(
                self._keys[span], x, of_x, weight, stride, None if self._strides is None else self._strides[span]
            )
            for span, x, of_x, weight in zip(spans, values, lengths, weights, strict=True)
        ]

    def permute(self, indices: Sequence[int]) -> KeyedJaggedTensor:
        """The keys at these places, in this order. One may be left out or stand twice, at a host synchronisation.

        Raises:
            InputError: if there is no such place.
        """
        wrong = [place for place in indices if not 0 <= place < len(self._keys)]
        if wrong:
            raise _error(f"place {wrong[0]}", f"places from 0 to {len(self._keys) - 1}", "Count the keys from 0.")
        device, strides = self._lengths.device, self.stride_per_key()
        order = torch.tensor(list(indices), dtype=torch.int64, device=device)
        sizes = torch.tensor(strides, dtype=torch.int64, device=device)
        counts = segment_sums(self._lengths, sizes)
        total = self._values.size(0)
        if sorted(indices) != list(range(len(self._keys))):
            by_key = self.length_per_key()
            total = sum(by_key[place] for place in indices)

        def in_order(sizes: Tensor, total: int) -> Tensor:
            return segment_index((sizes.cumsum(0) - sizes)[order], sizes[order], total)

        places = in_order(counts, total)
        return KeyedJaggedTensor._of(
            tuple(self._keys[place] for place in indices),
            self._values.index_select(0, places),
            self._lengths.index_select(0, in_order(sizes, sum(strides[place] for place in indices))),
            None if self._weights is None else self._weights.index_select(0, places),
            None if self._strides is not None else self.stride(),
            None if self._strides is None else tuple(self._strides[place] for place in indices),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedTensor:
        """On the device, with the same tensors where they are there already."""
        values = self._values.to(device, non_blocking=non_blocking)
        lengths = self._lengths.to(device, non_blocking=non_blocking)
        weights = None if self._weights is None else self._weights.to(device, non_blocking=non_blocking)
        return KeyedJaggedTensor._of(self._keys, values, lengths, weights, self._stride, self._strides)

    def __repr__(self) -> str:
        if not is_readable(self):
            return f"KeyedJaggedTensor({', '.join(self._keys)}: {summary(self)})"
        batch = f"batch {self.stride()}" if self._strides is None else f"batches {self.stride_per_key()}"
        lines = [f"KeyedJaggedTensor({len(self._keys)} keys, {batch}, {summary(self)}"]
        offsets, start = self.offsets().tolist(), 0
        for key, stride in zip(self._keys[:_SHOWN_KEYS], self.stride_per_key(), strict=False):
            lines.append(f"  {key}: {show(self, offsets[start : start + stride + 1])}")
            start += stride
        if len(self._keys) > _SHOWN_KEYS:
            lines.append(f"  ... {len(self._keys) - _SHOWN_KEYS} more keys")
        return "\n".join(lines) + ")"


def _error(fact: str, expected: str, remedy: str) -> InputError:
    return error(KeyedJaggedTensor, fact, expected, remedy)


def _flatten(x: KeyedJaggedTensor) -> tuple[list[Any], Any]:
    return [x._values, x._lengths, x._weights], (x._keys, x._stride, x._strides)


def _flatten_with_paths(x: KeyedJaggedTensor) -> tuple[list[tuple[pytree.KeyEntry, Any]], Any]:
    leaves, context = _flatten(x)
    return with_paths(leaves), context


def _unflatten(leaves: Iterable[Any], context: Any) -> KeyedJaggedTensor:
    keys, stride, strides = context
    values, lengths, weights = leaves
    return KeyedJaggedTensor._of(keys, values, lengths, weights, stride, strides)


pytree.register_pytree_node(
    KeyedJaggedTensor,
    _flatten,
    _unflatten,
    serialized_type_name="autoshard.KeyedJaggedTensor",
    flatten_with_keys_fn=_flatten_with_paths,
)
