"""What the fuzz suite draws: cases of the matrix, with every option that torch itself takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.matrix.case import BAG, EMBEDDING, LINEAR, Case

INF = float("inf")

# Bounds that some rows of standard normal numbers exceed and some do not, for rows of about ten columns.
BOUNDS = {INF: 1.5, -INF: 0.05, 0.0: 3.5, 0.5: 40.0, -1.0: 0.02, 1.0: 6.0, 1.7: 3.0, 2.0: 2.5, 3.0: 2.0}

# A request takes some cases of one mesh, as the request itself costs more than a case.
EAGER_CASES, COMPILED_CASES = 24, 2


@dataclass(frozen=True)
class Request:
    """Cases of one mesh, and how they are compiled: None for eager mode, or a backend."""

    cases: tuple[Case, ...]
    backend: str | None


@st.composite
def requests(draw: st.DrawFn, backends: tuple[str | None, ...]) -> Request:
    backend = draw(st.sampled_from(backends))
    ranks = tuple(draw(st.permutations(range(4)))[: draw(st.integers(1, 4))])
    number = draw(st.integers(1, EAGER_CASES if backend is None else COMPILED_CASES))
    drawn = (draw(cases(ranks, compiled=backend is not None)) for _ in range(number))
    return Request(tuple(case.but(dtype="float64") if _rounds(case, backend) else case for case in drawn), backend)


def _rounds(case: Case, backend: str | None) -> bool:
    """True where sums are made in another order than in one process.

    A sum of terms that all but cancel makes of one rounding a difference of any size; the matrix has other dtypes.
    """
    whole = case.plan == "replicate" and not case.replicated
    return case.op == LINEAR or case.weighted or whole or case.tail > 0 or backend == "inductor"


@st.composite
def cases(draw: st.DrawFn, ranks: tuple[int, ...], *, compiled: bool) -> Case:
    op = draw(st.sampled_from((EMBEDDING, BAG, LINEAR)))
    options: dict[str, Any] = {
        "ranks": ranks,
        "dtype": draw(st.sampled_from(("float32", "float64", "float16", "bfloat16"))),
        "replicated": draw(st.booleans()),
        "plan": draw(st.sampled_from(("colwise", "colwise", "replicate"))),
        "gradients": draw(st.sampled_from(("sum", "mean"))),
        "optimizer": draw(st.sampled_from(("sgd", "adam"))),
        "strided": draw(st.booleans()),
        "viewed": draw(st.booleans()),
        "columns": draw(st.integers(1, 14)),
    }
    ragged = not options["replicated"] and draw(st.booleans())
    if op == LINEAR:
        return _linear(draw, options, ragged)
    options["rows"] = draw(st.integers(1, 24))
    options["ids_dtype"] = draw(st.sampled_from(("int64", "int32")))
    options["functional"] = draw(st.booleans())
    if op == EMBEDDING:
        shape = _shape(draw, options, ragged, least=0)
    else:
        shape = _bags(draw, options, ragged)
    options |= _lookup_options(draw, options, shape, bag=op == BAG, compiled=compiled)
    return Case(op, shape, **options)


def _shape(draw: st.DrawFn, options: dict[str, Any], ragged: bool, least: int) -> tuple[int, ...]:
    """The shape of ids or of a linear's rows; the first dimension of each rank where they differ."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1 if ragged else least, max_size=3)))
    if ragged:
        options["sizes"] = tuple(draw(st.integers(0, 6)) for _ in options["ranks"])
    return shape


def _linear(draw: st.DrawFn, options: dict[str, Any], ragged: bool) -> Case:
    inputs = draw(st.integers(1, 20))
    shape = (*_shape(draw, options, ragged, least=0), inputs)
    then = draw(st.none() | st.integers(1, 9))
    return Case(LINEAR, shape, inputs, bias=draw(st.booleans()), then=then, **options)


def _bags(draw: st.DrawFn, options: dict[str, Any], ragged: bool) -> tuple[int, ...]:
    options["mode"] = draw(st.sampled_from(("sum", "mean", "max")))
    options["weighted"] = options["mode"] == "sum" and draw(st.booleans())
    if draw(st.booleans()):
        # torch refuses bags of 0 ids without offsets.
        shape: tuple[int, ...] = (draw(st.integers(0, 6)), draw(st.integers(1, 5)))
        if ragged:
            options["sizes"] = tuple(draw(st.integers(0, 6)) for _ in options["ranks"])
        return shape
    options["offsets_dtype"] = draw(st.sampled_from(("int64", "int32")))
    options["include_last_offset"] = draw(st.booleans())
    ids = [draw(st.integers(0, 16)) for _ in (options["ranks"] if ragged else [0])]
    # torch refuses ids that no bag takes.
    bags = [draw(st.integers(min(count, 1), 8)) for count in ids]
    if ragged:
        options["sizes"], options["bag_counts"] = tuple(ids), tuple(bags)
    options["bags"] = bags[0]
    # A whole table is left to torch, whose CPU kernel gives ids behind the last offset an uninitialised gradient.
    if options["include_last_offset"] and min(bags) > 0 and options["plan"] == "colwise":
        options["tail"] = draw(st.integers(0, min(ids)))
    return (ids[0],)


def _lookup_options(
    draw: st.DrawFn, options: dict[str, Any], shape: tuple[int, ...], *, bag: bool, compiled: bool
) -> dict[str, Any]:
    rows = options["rows"]
    found: dict[str, Any] = {"padding_idx": draw(st.none() | st.integers(-rows, rows - 1))}
    if draw(st.booleans()):
        p = draw(st.sampled_from(tuple(BOUNDS)))
        found |= {"max_norm": BOUNDS[p], "norm_type": p, "zeros": p <= 0}
    if options.get("mode") == "max":
        return found
    kind = draw(st.sampled_from(("dense", "dense", "frequency") if compiled else ("dense", "frequency", "sparse")))
    # Of no bag at all the oracle's gradient is dense; of one id without a dimension torch's own backward fails.
    if kind == "sparse" and shape and not (bag and _may_be_without_bags(options, shape)):
        optimizer = draw(st.sampled_from(("sgd", "sparse_adam", "adagrad")))
        return found | {"sparse": True, "optimizer": optimizer}
    if kind == "frequency" and (not bag or _can_be_balanced(options, shape)):
        found |= {"scale_grad_by_freq": True, "balanced": bag}
    return found


def _may_be_without_bags(options: dict[str, Any], shape: tuple[int, ...]) -> bool:
    if len(shape) > 1:
        return 0 in (options.get("sizes") or shape[:1])
    return 0 in (options.get("bag_counts") or (options["bags"],))


def _can_be_balanced(options: dict[str, Any], shape: tuple[int, ...]) -> bool:
    """torch's bag divides by the wrong count on the CPU, unless each id occurs equally often (pytorch #190063)."""
    sizes = options.get("sizes") or (shape[0],)
    counts = [size * (shape[1] if len(shape) > 1 else 1) for size in sizes]
    equal = len(set(counts)) == 1 and counts[0] % 2 == 0 and counts[0] // 2 <= options["rows"]
    return equal and not options.get("tail") and options.get("padding_idx") is None
