"""One prompt, one answer."""

from __future__ import annotations

import numpy as np

from penstock.trajectory import Sampling, VersionSegment
from penstock_rollout.agents.episode import Episode
from penstock_rollout.engines.engine import Engine, GenerateRequest


async def single_turn_agent(
    engine: Engine, request_id: str, prompt_token_ids: tuple[int, ...], sampling: Sampling
) -> Episode:
    """Generate one response; every token is the model's own and is trained."""
    token_ids: list[int] = []
    log_probs: list[float] = []
    segments: list[VersionSegment] = []
    finish_reason = None
    async for chunk in engine.generate(GenerateRequest(request_id, prompt_token_ids, sampling)):
        token_ids += chunk.token_ids
        log_probs += chunk.log_probs
        segments += chunk.segments
        finish_reason = chunk.finish_reason
    return Episode(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=np.ones(len(token_ids), dtype=np.uint8),
        log_probs=np.array(log_probs, dtype=np.float32),
        segments=_joined(segments),
        finish_reason=finish_reason or "aborted",
    )


def _joined(segments: list[VersionSegment]) -> tuple[VersionSegment, ...]:
    """Neighbours of one version become one segment."""
    joined: list[VersionSegment] = []
    for segment in segments:
        if joined and joined[-1].policy_version == segment.policy_version and joined[-1].end == segment.start:
            joined[-1] = VersionSegment(joined[-1].start, segment.end, segment.policy_version)
        else:
            joined.append(segment)
    return tuple(joined)
