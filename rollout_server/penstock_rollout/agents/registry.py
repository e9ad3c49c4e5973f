"""Agent loops by name."""

from __future__ import annotations

import difflib

from penstock.errors import InvalidInput
from penstock_rollout.agents.episode import AgentLoop
from penstock_rollout.agents.single_turn import single_turn_agent

AGENTS: dict[str, AgentLoop] = {"single_turn_agent": single_turn_agent}


def find_agent(name: str) -> AgentLoop:
    if name in AGENTS:
        return AGENTS[name]
    nearest = difflib.get_close_matches(name, AGENTS, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(AGENTS)}"
    raise InvalidInput("agent_name", f"unknown agent {name!r}; {hint}")
