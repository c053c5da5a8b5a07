"""Jagged features: for each key a batch of lists of ids of varying length.

What TorchRec's classes of the same names hold, with their method names, on plain torch: no compiled operators, and
nothing is cached, so that a tensor never disagrees with what was derived from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.errors import InputError, describe
from passes.ops.jagged import segment_index, segment_sums

_SHOWN_KEYS = 16
_SHOWN = 8


class JaggedTensor:
    """The lists of one key: values (N,), lengths (B,), and weights (N,) or none."""

    def __init__(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        self._values = values
        self._lengths = lengths
        self._weights = weights

    def values(self) -> Tensor:
        """(N,)."""
        return self._values

    def lengths(self) -> Tensor:
        """(B,)."""
        return self._lengths

    def offsets(self) -> Tensor:
        """(B+1,): where each list begins, and N."""
        return _offsets(self._lengths)

    def weights(self) -> Tensor:
        """(N,).

        Raises:
            InputError: if there are none.
        """
        return _present(self._weights)

    def weights_or_none(self) -> Tensor | None:
        """(N,), or None."""
        return self._weights

    def to_lists(self) -> list[list[int]]:
        """The values of each sample."""
        lists: list[list[int]] = [part.tolist() for part in self._values.split(self._lengths.tolist())]
        return lists

    def __repr__(self) -> str:
        if not _is_readable(self._values):
            return f"JaggedTensor({_summary(self._values, self._weights)})"
        shown = _show(self._values, self._weights, self.offsets().tolist())
        return f"JaggedTensor({_summary(self._values, self._weights)}: {shown})"


class KeyedJaggedTensor:
    """For each of F keys a batch of B lists of ids, stored key-major.

                 sample 0     sample 1    sample 2
        "A"      [7 8]        []          [9]
        "B"      [3]          [4]         [5 6 7]

        values   7 8 9 3 4 5 6 7        lengths   2 0 1 1 1 3        offsets   0 2 2 3 4 5 8

    Args:
        keys: F names. One may stand twice, but can then be reached only by place (`split`, `permute`).
        values: (N,).
        weights: (N,), or None.
        lengths: (F*B,) or (F, B), int32 or int64; their sum is N.
        offsets: (F*B+1,), in place of lengths: from 0 to N, ascending.
        stride: B, needed only where there are no keys.
        stride_per_key_per_rank: for keys with batches of their own: for each key the samples of each rank that they
            came from; one number in each list where they came from no other rank.

    Raises:
        InputError: in eager mode, if these do not fit together. What takes a look into the tensors (that the lengths
            add up to N) is checked where they travel.

    A pytree node, with values, lengths and weights as leaves. torch.compile takes it in and gives it out.
    """

    _keys: tuple[str, ...]
    _values: Tensor
    _lengths: Tensor
    _weights: Tensor | None
    # Kept only where there are no keys: otherwise the lengths tell.
    _stride: int | None
    _strides: tuple[tuple[int, ...], ...] | None

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
        if (lengths is None) == (offsets is None):
            raise _error(f"lengths {_given(lengths)} and offsets {_given(offsets)}", "one of the two", "Leave out one.")
        self._keys = tuple(keys)
        self._values = values
        self._lengths = torch.diff(offsets) if lengths is None else lengths.flatten()  # type: ignore[arg-type]
        self._weights = weights
        self._strides = None
        if stride_per_key_per_rank is not None:
            self._strides = tuple(tuple(by_rank) for by_rank in stride_per_key_per_rank)
        self._stride = (stride or 0) if not self._keys and self._strides is None else None
        if not torch.compiler.is_compiling():
            self._check(keys, offsets, stride)

    def _check(self, keys: Sequence[str], offsets: Tensor | None, stride: int | None) -> None:
        values, lengths, weights = self._values, self._lengths, self._weights
        if isinstance(keys, str) or not all(isinstance(key, str) for key in self._keys):
            raise _error(f"keys {keys!r}", "a sequence of strings", "Give a list of names.")
        if values.dim() != 1:
            raise _error(f"values of shape {tuple(values.shape)}", "one dimension", "Put all ids one after the other.")
        if lengths.dtype not in (torch.int32, torch.int64):
            raise _error(f"lengths or offsets of {lengths.dtype}", "torch.int32 or torch.int64", "Convert them.")
        if offsets is not None and (offsets.dim() != 1 or offsets.size(0) == 0):
            raise _error(f"offsets of shape {tuple(offsets.shape)}", "one dimension and a first 0", "Prepend a 0.")
        if weights is not None and weights.shape != values.shape:
            expected = f"{tuple(values.shape)}, the shape of the values"
            raise _error(f"weights of shape {tuple(weights.shape)}", expected, "Give each value one weight.")
        if self._strides is None:
            fits = lengths.size(0) % len(self._keys) == 0 if self._keys else lengths.size(0) == 0
            if stride is not None and self._keys:
                fits = lengths.size(0) == stride * len(self._keys)
            expected = f"{len(self._keys)} keys times {'one batch' if stride is None else stride}"
        else:
            fits = len(self._strides) == len(self._keys) and lengths.size(0) == sum(self.stride_per_key())
            expected = f"{[list(by_rank) for by_rank in self._strides]} for {len(self._keys)} keys"
        if not fits:
            raise _error(f"{lengths.size(0)} lengths", expected, "Give a length for each sample of each key.")

    @classmethod
    def _of(
        cls,
        keys: tuple[str, ...],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        stride: int | None = None,
        strides: tuple[tuple[int, ...], ...] | None = None,
    ) -> KeyedJaggedTensor:
        """Without checks: the sizes may be unbacked ones, and a pytree may hold anything."""
        new = cls.__new__(cls)
        new._keys, new._values, new._lengths, new._weights = keys, values, lengths, weights
        new._stride, new._strides = stride, strides
        return new

    @classmethod
    def from_lengths(
        cls,
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        *,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
    ) -> KeyedJaggedTensor:
        """As the constructor."""
        return cls(keys, values, weights, lengths, None, stride, stride_per_key_per_rank)

    @classmethod
    def from_offsets(
        cls,
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        *,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
    ) -> KeyedJaggedTensor:
        """As the constructor."""
        return cls(keys, values, weights, None, offsets, stride, stride_per_key_per_rank)

    @classmethod
    def from_lists(
        cls,
        keys: Sequence[str],
        lists: Sequence[Sequence[Sequence[int]]],
        weights: Sequence[Sequence[Sequence[float]]] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> KeyedJaggedTensor:
        """For each key a batch of lists of ids, and the weights in the same form.

        Values and lengths become int64, weights float32. Batches that differ between keys become strides of their own.

            KeyedJaggedTensor.from_lists(["A", "B"], [[[7, 8], [], [9]], [[3], [4], [5, 6, 7]]])

        Raises:
            InputError: if there is not one batch for each key, or the weights have another form.
        """
        if len(lists) != len(keys):
            raise _error(f"{len(lists)} batches of lists", f"{len(keys)}, one for each key", "Give [] to an empty one.")
        lengths = [len(sample) for batch in lists for sample in batch]
        values = [value for batch in lists for sample in batch for value in sample]
        flat = None
        if weights is not None:
            if [[len(sample) for sample in batch] for batch in weights] != [[len(s) for s in batch] for batch in lists]:
                raise _error("weights of another form than the lists", "a weight for each id", "Nest them alike.")
            of_all = [weight for batch in weights for sample in batch for weight in sample]
            flat = torch.tensor(of_all, dtype=torch.float32, device=device)
        strides = [len(batch) for batch in lists]
        return cls(
            keys,
            torch.tensor(values, dtype=torch.int64, device=device),
            flat,
            torch.tensor(lengths, dtype=torch.int64, device=device),
            stride_per_key_per_rank=[[stride] for stride in strides] if len(set(strides)) > 1 else None,
        )

    @classmethod
    def from_torchrec(cls, other: Any) -> KeyedJaggedTensor:
        """TorchRec's KeyedJaggedTensor as this one, with the same tensors.

        Raises:
            InputError: if it has inverse indices, which have no place here.
        """
        if other.inverse_indices_or_none() is not None:
            raise _error("a TorchRec tensor with inverse indices", "none", "Expand it before it is converted.")
        variable = other.variable_stride_per_key()
        return cls(
            other.keys(),
            other.values(),
            other.weights_or_none(),
            other.lengths(),
            stride=None if variable else other.stride(),
            stride_per_key_per_rank=other.stride_per_key_per_rank() if variable else None,
        )

    def to_torchrec(self) -> Any:
        """A `torchrec.KeyedJaggedTensor` with the same tensors; imports TorchRec."""
        from torchrec import KeyedJaggedTensor as TorchRecs  # type: ignore[import-not-found]

        if self._strides is None:
            return TorchRecs(self.keys(), self._values, self._weights, self._lengths, stride=self.stride())
        strides = self.stride_per_key_per_rank()
        return TorchRecs(self.keys(), self._values, self._weights, self._lengths, stride_per_key_per_rank=strides)

    @staticmethod
    def concat(tensors: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The keys of all, one tensor after the other.

        Raises:
            InputError: if there is none, if some have weights and others not, or if their strides differ or are not of
                one kind.
        """
        if not tensors:
            raise _error("no tensors to concatenate", "at least one", "Leave it out.")
        first = tensors[0]
        weights = [x._weights for x in tensors if x._weights is not None]
        if len(weights) not in (0, len(tensors)):
            raise _error("tensors with and without weights", "all with or all without", "Give all of them weights.")
        strides: tuple[tuple[int, ...], ...] | None = None
        if any(x._strides is not None for x in tensors):
            if any(x._strides is None for x in tensors):
                raise _error("strides of two kinds", "all with stride_per_key_per_rank or none", "Give it to all.")
            strides = tuple(by_rank for x in tensors for by_rank in x._strides or ())
        elif not torch.compiler.is_compiling() and len({x.stride() for x in tensors}) > 1:
            raise _error(f"strides {[x.stride() for x in tensors]}", "one stride", "Give strides per key.")
        keys = tuple(key for x in tensors for key in x._keys)
        return KeyedJaggedTensor._of(
            keys,
            torch.cat([x._values for x in tensors]),
            torch.cat([x._lengths for x in tensors]),
            torch.cat(weights) if weights else None,
            None if keys else first._stride,
            strides,
        )

    def keys(self) -> list[str]:
        """The F keys."""
        return list(self._keys)

    def values(self) -> Tensor:
        """(N,)."""
        return self._values

    def lengths(self) -> Tensor:
        """(F*B,)."""
        return self._lengths

    def offsets(self) -> Tensor:
        """(F*B+1,): where each list begins, and N."""
        return _offsets(self._lengths)

    def weights(self) -> Tensor:
        """(N,).

        Raises:
            InputError: if there are none.
        """
        return _present(self._weights)

    def weights_or_none(self) -> Tensor | None:
        """(N,), or None."""
        return self._weights

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def variable_stride_per_key(self) -> bool:
        """Whether each key has a batch of its own."""
        return self._strides is not None

    def stride(self) -> int:
        """B.

        Raises:
            InputError: if each key has a batch of its own.
        """
        if self._strides is not None:
            raise _error("a batch for each key", "one for all keys", "Use stride_per_key().")
        return self._lengths.size(0) // len(self._keys) if self._stride is None else self._stride

    def stride_per_key(self) -> list[int]:
        """The samples of each key."""
        if self._strides is not None:
            return [sum(by_rank) for by_rank in self._strides]
        return [self.stride()] * len(self._keys)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """For each key the samples of each rank they came from; empty if all keys share a stride."""
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
        """key -> its lists.

        Raises:
            InputError: if a key stands twice.
        """
        for key in self._keys:
            self._place(key)
        return dict(zip(self._keys, self._by_key(), strict=True))

    def __getitem__(self, key: str) -> JaggedTensor:
        """The lists of one key.

        Raises:
            KeyError: if there is no such key.
            InputError: if it stands twice.
        """
        return self._by_key()[self._place(key)]

    def _place(self, key: str) -> int:
        if key not in self._keys:
            raise KeyError(key)
        if self._keys.count(key) > 1:
            raise _error(f"key {key!r} stands {self._keys.count(key)} times", "once", "Take it apart with split().")
        return self._keys.index(key)

    def _by_key(self) -> list[JaggedTensor]:
        counts = self.length_per_key()
        lengths = self._lengths.split(self.stride_per_key())
        weights = [None] * len(counts) if self._weights is None else self._weights.split(counts)
        return [JaggedTensor(*parts) for parts in zip(self._values.split(counts), lengths, weights, strict=True)]

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Consecutive keys: segments[i] of them in the i-th tensor.

        Raises:
            InputError: if the segments do not add up to the keys.
        """
        if sum(segments) != len(self._keys) or any(count < 0 for count in segments):
            raise _error(
                f"segments {list(segments)}", f"numbers that add up to {len(self._keys)} keys", "Correct them."
            )
        counts, strides = self.length_per_key(), self.stride_per_key()
        spans, start = [], 0
        for count in segments:
            spans.append(slice(start, start + count))
            start += count
        values = self._values.split([sum(counts[span]) for span in spans])
        lengths = self._lengths.split([sum(strides[span]) for span in spans])
        weights: Sequence[Tensor | None] = [None] * len(spans)
        if self._weights is not None:
            weights = self._weights.split([sum(counts[span]) for span in spans])
        return [
            KeyedJaggedTensor._of(
                self._keys[span],
                values[place],
                lengths[place],
                weights[place],
                self.stride() if self._strides is None and not self._keys[span] else None,
                None if self._strides is None else self._strides[span],
            )
            for place, span in enumerate(spans)
        ]

    def permute(self, indices: Sequence[int]) -> KeyedJaggedTensor:
        """The keys at these places, in this order. A place may be left out or stand twice.

        Raises:
            InputError: if there is no such place.
        """
        wrong = [index for index in indices if not 0 <= index < len(self._keys)]
        if wrong:
            raise _error(f"place {wrong[0]}", f"places from 0 to {len(self._keys) - 1}", "Count the keys from 0.")
        device = self._lengths.device
        strides = self.stride_per_key()
        order = torch.tensor(list(indices), dtype=torch.int64, device=device)
        sizes = torch.tensor(strides, dtype=torch.int64, device=device)
        index = segment_index((sizes.cumsum(0) - sizes)[order], sizes[order], sum(strides[place] for place in indices))
        counts = segment_sums(self._lengths, sizes)
        # A reordering keeps the number of values, so that the host need not ask for it.
        total = self._values.size(0)
        if sorted(indices) != list(range(len(self._keys))):
            by_key = self.length_per_key()
            total = sum(by_key[place] for place in indices)
        places = segment_index((counts.cumsum(0) - counts)[order], counts[order], total)
        return KeyedJaggedTensor._of(
            tuple(self._keys[place] for place in indices),
            self._values.index_select(0, places),
            self._lengths.index_select(0, index),
            None if self._weights is None else self._weights.index_select(0, places),
            self.stride() if self._strides is None and not indices else None,
            None if self._strides is None else tuple(self._strides[place] for place in indices),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedTensor:
        """A copy on the device, or this very tensor's parts where they are there already."""
        values, lengths, weights = (
            None if x is None else x.to(device, non_blocking=non_blocking)
            for x in (self._values, self._lengths, self._weights)
        )
        return KeyedJaggedTensor._of(self._keys, values, lengths, weights, self._stride, self._strides)

    def __repr__(self) -> str:
        batch = f"batches {self.stride_per_key()}" if self._strides is not None else f"batch {self.stride()}"
        head = f"{len(self._keys)} keys, {batch}, {_summary(self._values, self._weights)}"
        if not self._keys or not _is_readable(self._values):
            return f"KeyedJaggedTensor({head})"
        offsets, start, lines = self.offsets().tolist(), 0, []
        for key, stride in zip(self._keys[:_SHOWN_KEYS], self.stride_per_key(), strict=False):
            lines.append(f"  {key}: {_show(self._values, self._weights, offsets[start : start + stride + 1])}")
            start += stride
        if len(self._keys) > _SHOWN_KEYS:
            lines.append(f"  ... {len(self._keys) - _SHOWN_KEYS} more keys")
        return "\n".join([f"KeyedJaggedTensor({head}", *lines]) + ")"


def _error(fact: str, expected: str, remedy: str) -> InputError:
    return InputError(describe("KeyedJaggedTensor", fact, expected, remedy))


def _given(x: Tensor | None) -> str:
    return "left out" if x is None else "given"


def _present(weights: Tensor | None) -> Tensor:
    if weights is None:
        raise _error("no weights", "some", "Use weights_or_none() where there may be none.")
    return weights


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(lengths.dtype)


def _is_readable(x: object) -> bool:
    """False for tensors without data, in whose place a pytree may hold anything."""
    plain = isinstance(x, Tensor) and not x.is_meta and not isinstance(x, torch._subclasses.FakeTensor)
    return plain and not torch.compiler.is_compiling()


def _summary(values: Tensor, weights: Tensor | None) -> str:
    weighted = "" if weights is None else f", weights {_dtype(weights)}"
    return f"{values.size(0)} values {_dtype(values)}{weighted}"


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _show(values: Tensor, weights: Tensor | None, offsets: list[int]) -> str:
    """[1 2] [] [3], or with weights [1:0.5 2:1] [] [3:2]."""
    texts = []
    for start, end in itertools.pairwise(offsets[: _SHOWN + 1]):
        shown = slice(start, min(end, start + _SHOWN))
        ids = [str(value) for value in values[shown].tolist()]
        if weights is not None:
            ids = [f"{value}:{weight:g}" for value, weight in zip(ids, weights[shown].tolist(), strict=False)]
        texts.append(f"[{' '.join(ids)}{' ...' if end - start > _SHOWN else ''}]")
    more = len(offsets) - 1 - _SHOWN
    return " ".join([*texts, f"... {more} more"] if more > 0 else texts)


def _flatten_jagged(x: JaggedTensor) -> tuple[list[Any], None]:
    return [x._values, x._lengths, x._weights], None


def _unflatten_jagged(leaves: Iterable[Any], context: None) -> JaggedTensor:
    return JaggedTensor(*leaves)


def _flatten_keyed(x: KeyedJaggedTensor) -> tuple[list[Any], Any]:
    return [x._values, x._lengths, x._weights], (x._keys, x._stride, x._strides)


def _unflatten_keyed(leaves: Iterable[Any], context: Any) -> KeyedJaggedTensor:
    keys, stride, strides = context
    return KeyedJaggedTensor._of(keys, *leaves, stride, strides)


pytree.register_pytree_node(
    JaggedTensor, _flatten_jagged, _unflatten_jagged, serialized_type_name="autoshard.JaggedTensor"
)
pytree.register_pytree_node(
    KeyedJaggedTensor, _flatten_keyed, _unflatten_keyed, serialized_type_name="autoshard.KeyedJaggedTensor"
)
