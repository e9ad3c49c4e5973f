"""The default agent: one prompt, one response."""

from __future__ import annotations

from penstock_rollout.agents.context import AgentContext
from penstock_rollout.agents.episode import Episode
from penstock_rollout.agents.transcript import Transcript


async def single_turn_agent(context: AgentContext) -> Episode:
    """Generate one response, or continue the one that another server began. The model samples every token, so all of
    them are trained."""
    transcript = Transcript(context)
    transcript.continue_saved()
    turn = await transcript.sample_turn()
    return transcript.episode(turn.finish_reason)
