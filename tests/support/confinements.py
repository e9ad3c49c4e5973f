"""Which confinements of the sandbox work on this machine."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock_rollout.rewards.sandbox.run import Choice, Sandbox


def reason_against(choice: Choice) -> str:
    """Why a confinement does not work here. Empty if it does."""
    try:
        Sandbox.open(choice)
    except ConfigError as error:
        return str(error)
    return ""


_CHOICES: tuple[Choice, ...] = ("bubblewrap", "builtin")
_REASONS = {choice: reason_against(choice) for choice in _CHOICES}
needs_sandbox = pytest.mark.skipif(bool(reason_against("auto")), reason=reason_against("auto") or "works")
WORKING = [
    pytest.param(choice, marks=pytest.mark.skipif(bool(reason), reason=reason or "works"))
    for choice, reason in _REASONS.items()
]
"""Both confinements, as parameters of a test. One that does not work here is skipped with its reason."""
