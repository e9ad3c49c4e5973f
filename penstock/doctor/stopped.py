"""Checks of a run that `penstock up` has started on this machine and that is stopped now."""

from __future__ import annotations

import os
from collections.abc import Callable

from penstock.config.run import RunConfig
from penstock.doctor.finding import Finding
from penstock.errors import PenstockError
from penstock.start_checks import check_datasets, check_first_rows, check_lengths, check_model, check_rewards

_CHECKS: dict[str, Callable[[RunConfig], None]] = {
    "model": check_model,
    "rewards": lambda config: check_rewards(config.rollout.reward),
    "dataset": check_datasets,
    "rows": check_first_rows,
    "lengths": check_lengths,
}


def is_stopped(config: RunConfig) -> bool:
    """Whether the process that supervised the run here has ended. False if the run was not started by `penstock up`."""
    try:
        supervisor = int((config.folder / "lock").read_text())
    except (OSError, ValueError):
        return False
    try:
        os.kill(supervisor, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def check_stopped(config: RunConfig) -> list[Finding]:
    """Say that the run is stopped and from where it continues, and check what its next start needs."""
    newest = max(config.folder.glob("checkpoints/term-*-step-*"), default=None)
    where = f"at its newest checkpoint, {newest.name}" if newest else "from the start: it has no checkpoint yet"
    findings = [Finding("run", "ok", f"{config.run} is stopped; `penstock up` with its config continues it {where}")]
    for name, check in _CHECKS.items():
        try:
            check(config)
        except PenstockError as error:
            findings.append(Finding(name, "fail", f"the next start would fail: {error}"))
        else:
            findings.append(Finding(name, "ok", "the next start finds it as it should be"))
    return findings
