"""Column layout: which rank holds which columns.

D columns over W ranks follow `torch.chunk`, as DTensor and DCP do: ceil(D / W) columns each until none are left, so
that the last ranks may hold fewer, or none. Columns stay in order: rank r holds columns `offset(r)` to `offset(r) +
size(r)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def chunk_sizes(length: int, parts: int) -> list[int]:
    """The sizes of `parts` pieces of `length` by the rule of `torch.chunk`; trailing pieces may be 0."""
    step = -(-length // parts)
    return [max(0, min(step, length - part * step)) for part in range(parts)]


def chunk_offset(length: int, parts: int, part: int) -> int:
    """Where piece `part` begins."""
    return min(length, part * -(-length // parts))


def owner_sizes(length: int, parts: int, owners: Sequence[int]) -> list[int]:
    """The sizes where only the `owners` among `parts` hold pieces: theirs by the rule of `torch.chunk`, 0 elsewhere."""
    sizes = dict(zip(owners, chunk_sizes(length, len(owners)), strict=True))
    return [sizes.get(part, 0) for part in range(parts)]


# In which dtypes results travel, forward and backward; None for their own.
Wire = tuple[torch.dtype | None, torch.dtype | None]
AS_IT_IS: Wire = (None, None)


def narrower(own: torch.dtype, wire: torch.dtype | None) -> torch.dtype:
    """In which dtype values travel: in `wire` if it has fewer bytes than their own."""
    return own if wire is None or wire.itemsize >= own.itemsize else wire


def id_dtype(num_embeddings: int) -> torch.dtype:
    """In which dtype ids of a table travel: int32 holds all of them, and one that is out of range, below 2^31 rows."""
    return torch.int32 if num_embeddings < 2**31 else torch.int64
