"""Steps that are compiled for a GPU which is not here. Each is compiled once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.gpu_compile import Compiled, compile_original, compile_sharded
from autoshard.pretend_gpu import NoGpuCompiler
from tests.models import model_of

ROWS = 32
Step = Callable[..., Compiled]


def build(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of tests/models.py in float32, and a rank's batch of 32 rows."""
    case = model_of(name)
    batch = case.one_batch(ROWS)
    return case.build().float(), tuple(x.float() if x.is_floating_point() else x for x in batch)


@functools.cache
def _step(name: str, world_size: int, arch: str) -> Compiled:
    return compile_sharded(functools.partial(build, name), world_size, arch, plan="paired")


@functools.cache
def _original(name: str, arch: str) -> Compiled:
    return compile_original(functools.partial(build, name), arch)


def _or_skip(compile_: Callable[..., Compiled]) -> Step:
    pytest.importorskip("triton", reason="Triton is not installed (the extra `test` brings it)")

    def run(*args: Any) -> Compiled:
        try:
            return compile_(*args)
        except NoGpuCompiler as error:  # names what this torch has not
            if torch.__version__.startswith("2.13."):
                raise
            pytest.skip(str(error))

    return run


@pytest.fixture
def step() -> Step:
    """(model, world size, arch) -> the sharded step."""
    return _or_skip(_step)


@pytest.fixture
def original() -> Step:
    """(model, arch) -> the step before sharding."""
    return _or_skip(_original)
