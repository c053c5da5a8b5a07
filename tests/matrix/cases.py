"""The matrix: every option of embedding, embedding_bag and linear, over meshes, placements, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Iterable

from tests.matrix.case import BAG, EMBEDDING, LINEAR, Case

INF = float("inf")

# World sizes 1 to 4; for each the identity, other orders, and groups that leave ranks of the world out.
MESHES = (
    (0,),
    (0, 1),
    (1, 0),
    (0, 1, 2),
    (2, 0, 1),
    (0, 1, 2, 3),
    (2, 3, 0, 1),
    (3, 0, 1, 2),
    (3, 2, 1, 0),
    (1, 3, 0, 2),
    (2, 3),
    (3, 1),
    (1, 2, 3),
)

EMBEDDINGS = (
    Case(EMBEDDING, (5, 4), 17, 12),
    Case(EMBEDDING, (6, 7, 6), 21, 11),
    Case(EMBEDDING, (8, 6, 5, 4), 23, 13),
    Case(EMBEDDING, (8, 6, 5, 4, 7), 23, 16),
    Case(EMBEDDING, (4,), 15, 14),
    Case(EMBEDDING, (34,), 15, 14, padding_idx=10),
    Case(EMBEDDING, (8, 6, 5, 4), 23, 13, padding_idx=12),
    Case(EMBEDDING, (4, 5, 6), 23, 13, max_norm=2.5),
    Case(EMBEDDING, (12, 7, 16), 23, 13, max_norm=2.5),
    Case(EMBEDDING, (8, 16, 20), 12, 12, max_norm=1.25, norm_type=1.0),
    Case(EMBEDDING, (30,), 15, 14, max_norm=2.0),
    Case(EMBEDDING, (), 15, 14),
    Case(EMBEDDING, (), 15, 14, padding_idx=-3),
    Case(EMBEDDING, (0,), 15, 14),
    Case(EMBEDDING, (0, 4), 15, 14, padding_idx=0),
    Case(EMBEDDING, (3, 0), 15, 14),
)

_SUMS = (
    Case(BAG, (5, 5), 17, 14),
    Case(BAG, (5, 5), 17, 14, max_norm=2.5),
    Case(BAG, (5, 5), 17, 14, padding_idx=6),
    Case(BAG, (8, 6), 24, 13),
    Case(BAG, (8,), 23, 13, bags=3),
    Case(BAG, (8,), 23, 13, bags=3, include_last_offset=True),
    Case(BAG, (12,), 17, 12, bags=3, max_norm=1.25),
    Case(BAG, (12,), 17, 12, bags=3, max_norm=1.25, padding_idx=10),
    Case(BAG, (4, 3), 16, 14, padding_idx=12),
)
BAGS = (
    *_SUMS,
    *(case.but(weighted=True) for case in _SUMS),
    Case(BAG, (5, 4), 17, 12, mode="mean"),
    Case(BAG, (5, 4), 17, 12, mode="mean", max_norm=2.0, norm_type=1.0),
    Case(BAG, (5,), 17, 12, mode="mean", bags=2),
    Case(BAG, (5,), 17, 12, mode="mean", bags=2, max_norm=1.25),
    Case(BAG, (5,), 17, 12, mode="mean", bags=2, max_norm=1.25, padding_idx=10),
    Case(BAG, (4, 3), 16, 14, mode="mean", padding_idx=12),
    Case(BAG, (6, 7), 21, 11, mode="max"),
    Case(BAG, (6, 7), 21, 11, mode="max", max_norm=1.5, norm_type=1.0),
    Case(BAG, (4, 3), 16, 14, mode="max"),
    Case(BAG, (12,), 16, 12, mode="max", bags=4),
    Case(BAG, (12,), 16, 12, mode="max", bags=4, include_last_offset=True),
    Case(BAG, (5,), 17, 12, mode="max", bags=2, max_norm=1.15),
    Case(BAG, (5,), 17, 12, mode="max", bags=2, max_norm=1.15, padding_idx=10),
    Case(BAG, (4, 3), 16, 14, mode="max", padding_idx=12),
)

_ONE_LINEAR = (
    Case(LINEAR, (2, 17), 17, 12),
    Case(LINEAR, (8, 21), 21, 11),
    Case(LINEAR, (7, 23), 23, 13),
    Case(LINEAR, (4, 15), 15, 14),
    Case(LINEAR, (10, 2, 17), 17, 12),
    Case(LINEAR, (13, 8, 21), 21, 11),
    Case(LINEAR, (27, 7, 23), 23, 13),
    Case(LINEAR, (100, 12, 4, 15), 15, 14),
    Case(LINEAR, (17,), 17, 12),
    Case(LINEAR, (21,), 21, 11),
    Case(LINEAR, (23,), 23, 13),
    Case(LINEAR, (15,), 15, 14),
    Case(LINEAR, (1, 17), 17, 12),
    Case(LINEAR, (0, 17), 17, 12),
)
_TWO_LINEARS = (
    Case(LINEAR, (22, 17), 17, 12, then=29),
    Case(LINEAR, (28, 21), 21, 11, then=29),
    Case(LINEAR, (37, 23), 23, 13, then=24),
    Case(LINEAR, (24, 15), 15, 14, then=20),
)
LINEARS = (
    *_ONE_LINEAR,
    *(case.but(bias=False) for case in _ONE_LINEAR),
    *_TWO_LINEARS,
    *(case.but(bias=False) for case in _TWO_LINEARS),
)

BASE = (*EMBEDDINGS, *BAGS, *LINEARS)

# One of each kind, small: what an option is crossed with.
KINDS = (
    Case(EMBEDDING, (5, 4), 17, 12),
    Case(BAG, (5, 4), 17, 12),
    Case(BAG, (5, 4), 17, 12, mode="mean"),
    Case(BAG, (5, 4), 17, 12, mode="max"),
    Case(BAG, (9,), 17, 12, bags=4),
    Case(BAG, (9,), 17, 12, bags=4, weighted=True),
    Case(BAG, (9,), 17, 12, bags=4, include_last_offset=True, mode="mean"),
    Case(LINEAR, (6, 17), 17, 12),
)
_LOOKUPS = KINDS[:-1]


def _few_columns() -> Iterable[Case]:
    """One column, an empty last rank, a last rank with less, three columns over four ranks."""
    for columns in (1, 3, 5, 9):
        for kind in (*KINDS, Case(LINEAR, (6, 17), 17, 12, bias=False), KINDS[0].but(max_norm=1.0)):
            yield kind.but(columns=columns).on(0, 1, 2, 3)
    for columns in (1, 5):
        for kind in KINDS:
            yield kind.but(columns=columns, replicated=True).on(2, 3, 0, 1)


def _dtypes() -> Iterable[Case]:
    for dtype in ("float16", "bfloat16", "float64"):
        for kind in KINDS:
            yield kind.but(dtype=dtype).on(1, 0)
            yield kind.but(dtype=dtype, replicated=True)
            yield kind.but(dtype=dtype, columns=5).on(0, 1, 2)
        yield KINDS[0].but(dtype=dtype, padding_idx=3)
        yield KINDS[5].but(dtype=dtype, rows=300, shape=(60,), bags=9)


def _norms() -> Iterable[Case]:
    """Bounds that some rows exceed and some do not. With p=0 another renorm would scale again, so they are counted."""
    bounds = {INF: 1.5, -INF: 0.05, 0.0: 11.0, 0.5: 95.0, -1.0: 0.02, 1.0: 9.0, 2.0: 3.5, 3.0: 2.5}
    bases = (
        Case(EMBEDDING, (5, 4), 17, 13),
        Case(BAG, (5, 4), 17, 13),
        Case(BAG, (9,), 17, 13, bags=4, mode="mean"),
        Case(BAG, (9,), 17, 13, bags=4, weighted=True),
    )
    for p, bound in bounds.items():
        for base in bases:
            case = base.but(norm_type=p, max_norm=bound, zeros=p <= 0)
            yield case.on(0, 1)
            yield case.on(3, 0, 1, 2)
            yield case.but(replicated=True, columns=5).on(0, 1, 2, 3)
        for dtype in ("float16", "bfloat16", "float64"):
            yield bases[0].but(norm_type=p, max_norm=bound, zeros=p <= 0, dtype=dtype)
            yield bases[3].but(norm_type=p, max_norm=bound, zeros=p <= 0, dtype=dtype)
    # A sum of squares beyond float16's largest number, and padding that is renormed as every row is.
    yield bases[0].but(dtype="float16", scale=100.0, max_norm=250.0)
    yield bases[1].but(dtype="float16", scale=100.0, max_norm=250.0)
    yield bases[0].but(padding_idx=2, max_norm=1.0)
    yield bases[0].but(shape=(0,), max_norm=1.0)
    yield bases[0].but(shape=(), max_norm=1.0)
    yield bases[0].but(optimizer="adam", max_norm=1.0)
    yield bases[0].but(gradients="mean", max_norm=1.0)
    yield bases[1].but(gradients="mean", max_norm=1.0)


def _frequencies() -> Iterable[Case]:
    """Torch's CPU bag divides by the wrong count unless all counts are equal (pytorch #190063)."""
    bag = {"scale_grad_by_freq": True, "balanced": True}
    for ranks in MESHES[::2]:
        yield Case(EMBEDDING, (5, 4), 7, 12, scale_grad_by_freq=True).on(*ranks)
        yield Case(EMBEDDING, (30,), 7, 12, scale_grad_by_freq=True, padding_idx=2).on(*ranks)
        yield Case(BAG, (5, 4), 17, 12, **bag).on(*ranks)
        yield Case(BAG, (8,), 17, 12, bags=3, mode="mean", **bag).on(*ranks)
    yield Case(EMBEDDING, (5, 4), 7, 12, scale_grad_by_freq=True, replicated=True)
    yield Case(EMBEDDING, (5, 4), 7, 12, scale_grad_by_freq=True, gradients="mean")
    yield Case(EMBEDDING, (5, 4), 7, 12, scale_grad_by_freq=True, max_norm=2.0)
    yield Case(BAG, (8,), 17, 12, bags=3, replicated=True, **bag)
    yield Case(BAG, (8,), 17, 12, bags=3, weighted=True, **bag)


def _gradients_and_optimizers() -> Iterable[Case]:
    for kind in KINDS:
        yield kind.but(gradients="mean").on(0, 1)
        yield kind.but(gradients="mean").on(2, 0, 1)
        yield kind.but(gradients="mean").on(3, 2, 1, 0)
        yield kind.but(optimizer="adam").on(1, 3)
        yield kind.but(optimizer="adam", gradients="mean", columns=3).on(0, 1, 2, 3)
        yield kind.but(optimizer="adam", replicated=True)


def _inputs() -> Iterable[Case]:
    """Integer types, memory layouts, views, and the functions in place of the layers."""
    for ids in ("int32", "int64"):
        yield KINDS[0].but(ids_dtype=ids, strided=True)
        yield KINDS[1].but(ids_dtype=ids, strided=True)
        for offsets in ("int32", "int64"):
            for base in _LOOKUPS[4:]:
                yield base.but(ids_dtype=ids, offsets_dtype=offsets)
                yield base.but(ids_dtype=ids, offsets_dtype=offsets, replicated=True)
    for kind in KINDS:
        yield kind.but(strided=True).on(0, 1, 2)
        yield kind.but(strided=True, replicated=True)
        yield kind.but(viewed=True).on(0, 1)
        yield kind.but(viewed=True, columns=9).on(0, 1, 2, 3)
        yield kind.but(viewed=True, replicated=True).on(1, 0)
    for kind in _LOOKUPS:
        yield kind.but(functional=True)
        yield kind.but(functional=True, padding_idx=-2).on(2, 1, 0)
        yield kind.but(functional=True, max_norm=1.5)
        yield kind.but(functional=True, replicated=True, padding_idx=-1)
    yield Case(EMBEDDING, (5, 4), 17, 12, padding_idx=-1)
    yield Case(EMBEDDING, (5, 4), 17, 12, padding_idx=-17)


def _bags() -> Iterable[Case]:
    """More bags than ids, one bag, no ids, a tail behind the last offset, bags of padding only."""
    for mode in ("sum", "mean", "max"):
        for last in (False, True):
            base = Case(BAG, (9,), 17, 12, mode=mode, include_last_offset=last)
            yield base.but(shape=(3,), bags=8)
            yield base.but(shape=(3,), bags=8, replicated=True)
            yield base.but(bags=1)
            yield base.but(bags=1).on(1, 2, 3)
            yield base.but(shape=(0,), bags=4)
            yield base.but(shape=(0,), bags=0)
            yield base.but(bags=4, rows=1, padding_idx=0)
            if last:
                for tail in (1, 4, 9):
                    yield base.but(bags=3, tail=tail)
                    yield base.but(bags=3, tail=tail, replicated=True)
                    yield base.but(bags=3, tail=tail, weighted=mode == "sum").on(2, 3, 0, 1)
        yield Case(BAG, (0, 4), 17, 12, mode=mode)
        yield Case(BAG, (4, 1), 17, 12, mode=mode)
        yield Case(BAG, (5, 4), 1, 12, mode=mode, padding_idx=0)


def _whole_parameters() -> Iterable[Case]:
    """A plan that shards nothing: what is left is the reduction of the gradients."""
    for kind in KINDS:
        for gradients in ("sum", "mean"):
            yield kind.but(plan="replicate", gradients=gradients).on(1, 0)
        yield kind.but(plan="replicate", replicated=True)


def _large_ids() -> Iterable[Case]:
    """Ids that per_sample_weights' dtype could not hold: beyond 2^24 (float32), 2^11 (float16), 2^8 (bfloat16)."""
    table = {"rows": 2**24 + 8, "columns": 1, "lowest_id": 2**24 - 8, "weighted": True}
    for dtype in ("bfloat16", "float16"):
        yield Case(BAG, (9,), bags=4, dtype=dtype, **table)
        yield Case(BAG, (5, 4), dtype=dtype, **table)
    for dtype, power in (("float16", 11), ("bfloat16", 8)):
        small = {"rows": 2**power + 40, "columns": 5, "lowest_id": 2**power, "weighted": True}
        for ranks in ((0, 1), (0, 1, 2, 3), (3, 1)):
            yield Case(BAG, (300,), bags=280, dtype=dtype, **small).on(*ranks)
            yield Case(BAG, (30, 4), dtype=dtype, **small).on(*ranks)


def _sparse() -> Iterable[Case]:
    for kind in _LOOKUPS:
        if kind.mode != "max":
            case = kind.but(sparse=True)
            yield case.on(0, 1)
            yield case.but(columns=9).on(2, 0, 1)
            yield case.but(columns=5).on(3, 2, 1, 0)
            yield case.but(gradients="mean").on(1, 3)
            yield case.but(padding_idx=3)
            yield case.but(replicated=True)
            yield case.but(dtype="bfloat16")
            yield case.but(dtype="float64")
            yield case.but(functional=True)
            yield case.but(plan="replicate")
            yield case.but(optimizer="sparse_adam", columns=9).on(0, 1, 2)
            yield case.but(optimizer="adagrad", columns=5).on(0, 1, 2, 3)
    yield Case(EMBEDDING, (5, 4), 17, 12, sparse=True, max_norm=2.0)
    yield Case(EMBEDDING, (5, 4), 17, 12, sparse=True, sizes=(3, 0, 2)).on(0, 1, 2)
    yield Case(BAG, (9,), 17, 12, sparse=True, sizes=(9, 4), bag_counts=(1, 6))
    yield Case(EMBEDDING, (0,), 17, 12, sparse=True)
    yield Case(EMBEDDING, (), 17, 12, sparse=True)


def _ragged() -> Iterable[Case]:
    """Sizes that differ between ranks, a rank with one row, with none, all with none."""
    for sizes in ((3, 5), (4, 0), (0, 6), (1, 2, 3), (0, 0, 7), (2, 9, 1, 4), (5, 0, 3, 0), (0, 0, 0, 0)):
        ranks = tuple(range(len(sizes)))
        for columns, gradients in ((12, "sum"), (5, "mean")):
            how = {"gradients": gradients, "sizes": sizes, "ranks": ranks}
            yield Case(EMBEDDING, (1, 4), 17, columns, **how)
            yield Case(EMBEDDING, (1,), 17, columns, padding_idx=3, **how)
            yield Case(LINEAR, (1, 17), 17, columns, **how)
            yield Case(LINEAR, (1, 2, 17), 17, columns, bias=False, **how)
            for mode in ("sum", "mean", "max"):
                base = Case(BAG, (1,), 17, columns, mode=mode, **how)
                yield base.but(shape=(1, 4))
                yield base.but(bags=3)
                counts = tuple((7 * place + 3) % 5 for place in ranks)
                # Ids that no bag takes are refused by torch: as many bags as ids where there are any.
                some = tuple(max(count, min(size, 1)) for count, size in zip(counts, sizes, strict=True))
                yield base.but(bag_counts=some)
                yield base.but(bag_counts=some, include_last_offset=True)
                yield base.but(bag_counts=some, weighted=mode == "sum", ids_dtype="int32")
        yield Case(EMBEDDING, (1, 4), 17, 12, sizes=sizes, max_norm=2.0).on(*ranks)
        yield Case(BAG, (1,), 17, 12, sizes=sizes, bags=3, max_norm=11.0, norm_type=0.0, zeros=True).on(*ranks)
        yield Case(EMBEDDING, (1, 4), 7, 12, sizes=sizes, scale_grad_by_freq=True).on(*ranks)
    for mode in ("sum", "mean", "max"):
        yield Case(BAG, (6,), 17, 12, mode=mode, bag_counts=(2, 9, 1, 4)).on(3, 2, 1, 0)
        yield Case(BAG, (6,), 17, 12, mode=mode, bag_counts=(2, 9, 1, 4), weighted=mode == "sum").on(0, 1, 2, 3)


def _whole_tables() -> Iterable[Case]:
    """Replicated tables of which every rank must see all ranks' ids."""
    for options in (
        {"max_norm": 1.5},
        {"max_norm": 11.0, "norm_type": 0.0, "zeros": True},
        {"scale_grad_by_freq": True, "balanced": True},
    ):
        for base in (*_LOOKUPS[:3], Case(BAG, (8,), 17, 12, bags=3)):
            yield base.but(plan="replicate", **options)
            yield base.but(plan="replicate", gradients="mean", **options).on(2, 0, 1)


BY_OPTION: dict[str, tuple[Case, ...]] = {
    "few columns": tuple(_few_columns()),
    "dtypes": tuple(_dtypes()),
    "norms": tuple(_norms()),
    "frequencies": tuple(_frequencies()),
    "gradients and optimizers": tuple(_gradients_and_optimizers()),
    "inputs": tuple(_inputs()),
    "bags": tuple(_bags()),
    "whole parameters": tuple(_whole_parameters()),
    "large ids": tuple(_large_ids()),
    "sparse": tuple(_sparse()),
    "whole tables": tuple(_whole_tables()),
    "ragged": tuple(_ragged()),
}

# The base cases on every mesh, and with replicated inputs on three.
BY_MESH: dict[tuple[int, ...], tuple[Case, ...]] = {ranks: tuple(case.on(*ranks) for case in BASE) for ranks in MESHES}
REPLICATED = tuple(case.but(replicated=True).on(*ranks) for ranks in ((0, 1), (2, 3, 0, 1), (3, 1)) for case in BASE)


def _compiled() -> Iterable[Case]:
    """Every kind on two ranks, and what a compiler could lose: writes in place, views, an order, uneven columns."""
    yield from (case for case in BY_MESH[0, 1] if len(case.shape) < 4)
    yield from [case for case in REPLICATED if case.ranks == (3, 1)][::5]
    strides = {"norms": 11, "inputs": 9, "bags": 12, "dtypes": 11, "frequencies": 6, "gradients and optimizers": 8}
    for option, stride in strides.items():
        yield from [case for case in BY_OPTION[option] if case.world == 2][::stride]
    yield from [case for case in BY_OPTION["few columns"] if case.columns in (1, 5)][::6]
    yield from BY_OPTION["whole parameters"][::7]
    yield from [case for case in BY_OPTION["ragged"] if case.world == 2][::10]


def _inductor() -> Iterable[Case]:
    for kind in KINDS:
        yield kind.but(columns=9)
    for kind in KINDS[::2]:
        yield kind.but(columns=9, replicated=True)
    yield KINDS[0].but(columns=5, gradients="mean").on(2, 3, 0, 1)
    yield KINDS[7].but(columns=5, then=7, gradients="mean", optimizer="adam").on(0, 1, 2)
    yield KINDS[0].but(max_norm=11.0, norm_type=0.0, zeros=True)
    yield KINDS[5].but(max_norm=3.5, columns=13)
    yield KINDS[3].but(padding_idx=3, viewed=True, ids_dtype="int32")
    yield KINDS[2].but(dtype="bfloat16", strided=True)
    yield KINDS[0].but(scale_grad_by_freq=True, padding_idx=2)
    yield KINDS[0].but(shape=(1, 4), sizes=(3, 5))
    yield KINDS[5].but(sizes=(9, 4), bag_counts=(1, 6))
    yield KINDS[7].but(sizes=(0, 6))
    yield KINDS[6].but(sizes=(9, 4), bag_counts=(2, 6))


COMPILED = tuple(_compiled())
INDUCTOR = tuple(_inductor())
