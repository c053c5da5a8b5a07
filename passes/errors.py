"""The error classes of autoshard.

Every message has four parts in this order: the place (module path, source line where known), the fact that was found,
what was expected, and what to do about it. `describe` puts them together, so that no message lacks one.
"""

from __future__ import annotations


class AutoshardError(Exception):
    """Base of everything that autoshard raises on purpose."""


class PlanError(AutoshardError, ValueError):
    """A plan that does not fit the model: an unknown strategy, a glob that matches nothing, an impossible placement."""


class MeshError(AutoshardError, ValueError):
    """A device mesh that autoshard cannot shard over."""


class CaptureError(AutoshardError):
    """A model, or an argument of `autoshard()`, that cannot be captured."""


class RewriteError(AutoshardError):
    """A rewritten graph that breaks a promise. A fault of autoshard, never of the model."""


class InputError(AutoshardError, ValueError):
    """A batch that the sharded model cannot compute: sizes that differ between ranks, malformed offsets."""


class IdRangeError(InputError, IndexError):
    """An id outside of its table."""


class AgreementError(AutoshardError):
    """The ranks were given different models or plans, or one of them failed where the others did not."""


class ConsumedError(AutoshardError):
    """A parameter object from before `autoshard()` was used after it."""


class EquivalenceError(AutoshardError, AssertionError):
    """The sharded model computed something else than the original."""


def describe(place: str, fact: str, expected: str, remedy: str) -> str:
    """One message out of its four parts."""
    return f"{place}: {fact}; expected {expected}. {remedy}"
