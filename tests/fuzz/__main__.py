"""`python -m tests.fuzz "Case(...)" [backend]` runs one case of the matrix."""

from __future__ import annotations

import sys

from tests.matrix import case as cases
from tests.matrix.run import run_cases
from tests.pool import Pool


def main() -> None:
    text, *backend = sys.argv[1:]
    case = eval(text, {**vars(cases), "inf": float("inf")})
    pool = Pool()
    try:
        results = pool.run(run_cases, [case], *backend, ranks=case.ranks, timeout=120.0)
    finally:
        pool.close()
    failures = list(dict.fromkeys(text for found in results for text in found))
    print("\n".join(failures) or "equal to one process")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
