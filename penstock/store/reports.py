"""What the processes of a run report for people: phases of their start, and notices. The API shows both."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_BATCH = "waiting for the first batch"
"""Phase of a learner that is ready to train."""
LAST_VALIDATION = "waiting for the validation of the last policy"
"""The last phase of a learner, after its last step."""
READY_PHASES = ("serving", "training", LAST_VALIDATION)
"""Phases of a process that has started."""


@dataclass(frozen=True)
class Phase:
    """A phase of the start of a process, such as `loading the model`."""

    name: str
    entered_at_ms: int


@dataclass(frozen=True)
class Notice:
    """What the processes of a run want its users to know. Equal events are one notice with a count."""

    kind: str
    """reward_failed, default_reward, prompt_failed, process_restarted, server_failed or server_lost."""
    text: str
    """One line about the first of the events."""
    detail: str
    """More about the first event, such as a traceback; may be empty."""
    count: int
    first_at_ms: int
    last_at_ms: int
