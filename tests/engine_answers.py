"""An engine's answer to one request, put together from its chunks. This needs neither pytest nor a model."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_rollout.engines.engine import TokenChunk


@dataclass(frozen=True)
class Answer:
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str | None
    arrivals: tuple[float, ...] = ()
    """When each token arrived, if it was measured."""

    @classmethod
    def of(cls, prompt: tuple[int, ...], chunks: list[TokenChunk]) -> Answer:
        versions: list[int] = []
        for segment in (segment for chunk in chunks for segment in chunk.segments):
            assert segment.start == len(versions), "segments leave no gap and do not overlap"
            versions += [segment.policy_version] * (segment.end - segment.start)
        assert all(chunk.finish_reason is None for chunk in chunks[:-1])
        token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
        log_probs = tuple(log_prob for chunk in chunks for log_prob in chunk.log_probs)
        assert len(token_ids) == len(log_probs) == len(versions), "a token without its stamp"
        return cls(prompt, token_ids, log_probs, tuple(versions), chunks[-1].finish_reason)
