"""JSON of the routes of sessions."""

from __future__ import annotations

from penstock_services.gateway.bodies import Body


class RewardBody(Body):
    reward: float
    reward_parts: dict[str, float] = {}
    task_id: str = ""
    """The task of a session that was not leased with one; empty: none."""
    run: str = ""
    """The run of the session's calls; empty: the gateway's own."""
