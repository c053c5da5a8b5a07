"""On a GPU what is tested elsewhere on the CPU. The same bodies run on the CPU too, as slow tests, to show that they
are right where no GPU is.

With NCCL each rank needs a GPU of its own. Several gloo ranks share one, which is enough for results.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.launch import launch
from tests.gpu import bodies

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ROUNDING = 1e-12
DLRM = Path(__file__).resolve().parents[2] / "examples" / "dlrm.py"


def _gpu(*values: Any, least: int = 1) -> Any:
    reason = f"needs {least} CUDA device{'s' if least > 1 else ''}; there are {GPUS}"
    return pytest.param(*values, marks=[pytest.mark.gpu, pytest.mark.skipif(least > GPUS, reason=reason)])


# (device, backend, ranks)
RECORDABLE = [
    pytest.param("cpu", "gloo", 1, marks=pytest.mark.slow),
    pytest.param("cpu", "gloo", 3, marks=pytest.mark.slow),
    _gpu("cuda", "nccl", 1),
    _gpu("cuda", "nccl", 2, least=2),
    _gpu("cuda", "nccl", 4, least=4),
]
# Gloo takes tensors through the host, which no CUDA graph can record.
PLACES = [*RECORDABLE, _gpu("cuda", "gloo", 3)]
everywhere = pytest.mark.parametrize(("device", "backend", "ranks"), PLACES)
where_graphs_record = pytest.mark.parametrize(("device", "backend", "ranks"), RECORDABLE)
LEAST_SHARE = 0.7
ROOM = 48e9  # bytes: what the tables of the benchmark take, while they are stacked


def on_ranks(body: Callable[..., Any], device: str, backend: str, ranks: int, *args: Any) -> list[Any]:
    return launch(body, (device, *args), ranks, backend, 600.0)


@everywhere
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("model", bodies.MODELS)
def test_a_sharded_model_trains_as_one_process_does(
    device: str, backend: str, ranks: int, model: str, compiled: bool
) -> None:
    assert max(on_ranks(bodies.model_beside_one_process, device, backend, ranks, model, compiled)) <= ROUNDING


@where_graphs_record
@pytest.mark.parametrize("model", ["two_tower", "dlrm"])
def test_cuda_graphs_are_replayed_with_the_results_of_the_compiled_model(
    device: str, backend: str, ranks: int, model: str
) -> None:
    for found in on_ranks(bodies.replayed_beside_compiled, device, backend, ranks, model):
        assert found.gap <= ROUNDING
        if device == "cuda":
            assert found.left_out == 0
            assert found.recorded == 0
            assert found.replayed >= 2  # forward and backward
        else:
            assert (found.recorded, found.replayed) == (0, 0)


@pytest.mark.parametrize(("device", "backend", "ranks"), [_gpu("cuda", "nccl", 1)])
def test_lookup_pooling_and_rearrangement_reach_most_of_the_memory_bandwidth(
    device: str, backend: str, ranks: int
) -> None:
    if torch.cuda.get_device_properties(0).total_memory < ROOM:
        pytest.skip(f"needs a GPU of {ROOM / 1e9:.0f} GB")
    (share,) = on_ranks(bodies.share_of_the_copy, device, backend, ranks)
    assert share >= LEAST_SHARE


@everywhere
@pytest.mark.parametrize(
    "body",
    [
        bodies.max_norm_beside_one_process,
        bodies.sparse_adam_beside_one_process,
        bodies.rows_that_differ_between_ranks,
    ],
)
def test_options_of_lookups_mean_what_they_mean_in_one_process(
    device: str, backend: str, ranks: int, body: Callable[..., Any]
) -> None:
    assert max(on_ranks(body, device, backend, ranks)) <= ROUNDING


@everywhere
def test_an_id_out_of_range_is_told_on_every_rank(device: str, backend: str, ranks: int) -> None:
    messages = on_ranks(bodies.a_bad_id_on_the_last_rank, device, backend, ranks)
    assert len(set(messages)) == 1
    assert "99" in messages[0]


@everywhere
def test_a_rank_holds_its_columns_only(device: str, backend: str, ranks: int) -> None:
    held, whole = on_ranks(bodies.bytes_held, device, backend, ranks)[0]
    columns = -(-128 // ranks)
    assert whole * columns // 128 <= held <= whole * columns // 128 + 2**21


@pytest.mark.parametrize("ranks", [_gpu(1), _gpu(2, least=2)])
def test_the_dlrm_trains_on_gpus(ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", str(DLRM), "--steps", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
