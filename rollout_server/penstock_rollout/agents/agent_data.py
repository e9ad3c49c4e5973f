"""The state of one multi-turn sample. Tools written for verl may read it: the names are those of verl's AgentData."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AgentData:
    request_id: str
    messages: list[dict[str, Any]]
    """The conversation so far, with the assistant's turns as text."""
    tools_kwargs: dict[str, Any] = field(default_factory=dict)
    interaction_kwargs: dict[str, Any] = field(default_factory=dict)
    tool_rewards: list[float] = field(default_factory=list)
    """One reward per executed tool call."""
    turn_scores: list[float] = field(default_factory=list)
    """One score per reply of the interaction."""
    user_turns: int = 0
    """Replies to the model: the results of the calls of a turn are one, and so is a reply of the interaction."""
    assistant_turns: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Tools may keep data of the sample here."""
    image_data: None = None
    video_data: None = None
