"""What a MemoryStore holds of a prompt, a group and an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.sample_scores import PromptSamples


@dataclass
class MemoryPrompt:
    payload: bytes
    priority: int = 0
    evaluation_id: str = ""
    attempt: int = 0
    failures: int = 0
    spared: int = 0
    """How many opened breakers took its failures back."""
    spared_at: int = -1
    """The number of accepted groups at the last of them."""
    owner: tuple[str, int] | None = None
    """Server and attempt of the lease; None if it is not leased."""
    submitted_at: float = 0.0
    saved: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Saved tokens by sample and start."""
    saved_from: set[str] = field(default_factory=set)
    """Servers that saved them."""


@dataclass(frozen=True)
class MemoryGroup:
    attempt: int
    payload: bytes
    admission: float
    min_version: int
    appended_at: float


@dataclass
class MemoryEvaluation:
    num_prompts: int
    num_finished: int = 0
    num_failed: int = 0
    rewards: list[list[float]] = field(default_factory=list)
    samples: list[PromptSamples] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: dict[int, bytes] = field(default_factory=dict)
    kept_until: float = 0.0
    kept_bytes: int = 0
    num_left_out: int = 0

    def keep(self, prompt_id: int, group: bytes, max_bytes: int, until: float) -> None:
        """Keep the group for the learner's reward model, if there is room."""
        self.kept_bytes += len(group)
        if self.kept_bytes <= max_bytes:
            self.kept[prompt_id], self.kept_until = group, until
        else:
            self.num_left_out += 1
