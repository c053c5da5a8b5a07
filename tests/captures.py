"""Captures of the models, by tracing and by torch.export, made once for all tests of a process."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
from torch import nn

from autoshard.capture import Capture, capture
from autoshard.export import capture_export
from tests.models import MODELS, Model

LADDERS = ("fx", "export")

# torch.export takes seconds for these, and what they show is shown by smaller models as well.
_EXPORTED_SLOWLY = ("encoder", "attention", "transformer", "dlrm")


def by_ladder(*cases: Any) -> list[Any]:
    """(model, ladder), or where the cases are tuples (model, ..., ladder)."""
    return [_parameter(case, ladder) for case in cases for ladder in LADDERS]


def exported(*cases: Any) -> list[Any]:
    """`by_ladder`, of one ladder."""
    return [_parameter(case, "export") for case in cases]


def _parameter(case: Any, ladder: str) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    slow = ladder == "export" and values[0] in _EXPORTED_SLOWLY
    return pytest.param(*values, ladder, marks=[pytest.mark.slow] if slow else [])


def captured(model: nn.Module, ladder: str, case: Model) -> Capture:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture(model) if ladder == "fx" else capture_export(model, case.one_batch())


@functools.cache
def captured_once(name: str, ladder: str) -> tuple[nn.Module, Capture]:
    """A model in training mode and its capture, to be looked at only, or copied together."""
    model = MODELS[name].make()
    return model, captured(model, ladder, MODELS[name])
