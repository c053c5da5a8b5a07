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
_EXPORTED_SLOWLY = ("encoder", "attention", "transformer")


def by_ladder(*cases: Any) -> list[Any]:
    """(model, ladder), or where the cases are tuples (model, ..., ladder)."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        for ladder in LADDERS:
            slow = ladder == "export" and values[0] in _EXPORTED_SLOWLY
            found.append(pytest.param(*values, ladder, marks=[pytest.mark.slow] if slow else []))
    return found


def captured(model: nn.Module, ladder: str, case: Model) -> Capture:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture(model) if ladder == "fx" else capture_export(model, case.one_batch())


@functools.cache
def captured_once(name: str, ladder: str) -> tuple[nn.Module, Capture]:
    """A model in training mode and its capture, to be looked at only, or copied together."""
    model = MODELS[name].make()
    return model, captured(model, ladder, MODELS[name])
