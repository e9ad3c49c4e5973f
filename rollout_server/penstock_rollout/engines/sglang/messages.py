"""Build the body of a generate call to SGLang, and read its stream messages. Plain data, no HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import Unavailable
from penstock.trajectory import FinishReason, Sampling, VersionSegment
from penstock_rollout.engines.engine import TokenChunk

NUCLEUS_TOP_K = 4000
"""SGLang reports log-probs after top-p only if top-k bounds the nucleus. The limit is 4096 tokens, ties included."""
FIRST_TOKEN_ONLY = 1 << 30
"""A stream interval that no response reaches: SGLang sends the first token, then all others at the end."""


@dataclass(frozen=True)
class Event:
    """One message of a stream. `num_tokens` counts from the start of the response; the lists hold new tokens only."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    num_tokens: int
    finish_reason: dict[str, Any] | None
    spans: tuple[VersionSegment, ...] | None
    """Which version produced which tokens. SGLang reports it in the last message of a stream only."""


def generate_body(
    rid: str, prompt_token_ids: tuple[int, ...], sampling: Sampling, *,
    max_tokens: int, stop_ids: list[int], seed: int, salt: str, chunk_tokens: int,
) -> dict[str, Any]:  # fmt: skip
    """Build the body. It always asks for a stream, because the first message shows that the request has started.

    A message follows after each `chunk_tokens` tokens. With FIRST_TOKEN_ONLY, the second message is the last one."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_new_tokens": max_tokens,
        "stop_token_ids": stop_ids,
        "sampling_seed": seed,
        "stream_interval": chunk_tokens,
    }
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(prompt_token_ids),
        "sampling_params": params,
        "return_logprob": True,
        "stream": True,
        "cache_salt": salt,
    }
    if sampling.ignore_eos:
        params |= {"ignore_eos": True, "stop_token_ids": []}
    if sampling.is_truncated:
        params["top_k"] = min(sampling.top_k or NUCLEUS_TOP_K, NUCLEUS_TOP_K)
        body["return_sampling_mask"] = True
    return body


def read_event(message: dict[str, Any], sampling: Sampling, num_seen: int) -> Event:
    """Read a message. The last message of an aborted request repeats earlier tokens; they are dropped."""
    meta = message["meta_info"]
    num_tokens = max(meta.get("completion_tokens", num_seen), num_seen)
    num_new = num_tokens - num_seen
    if sampling.is_truncated:
        log_probs = meta.get("output_token_sampling_logprobs", [])
    else:
        log_probs = [entry[0] for entry in meta.get("output_token_logprobs", [])]
    event = Event(
        token_ids=tuple(message["output_ids"][len(message["output_ids"]) - num_new :]) if num_new else (),
        log_probs=tuple(log_probs[len(log_probs) - num_new :]) if num_new else (),
        num_tokens=num_tokens,
        finish_reason=meta.get("finish_reason"),
        spans=_spans(meta.get("weight_versions")),
    )
    if not len(event.token_ids) == len(event.log_probs) == num_new:
        raise Unavailable(
            f"SGLang sent {len(event.token_ids)} ids and {len(event.log_probs)} log-probs for {num_new} tokens"
        )
    return event


def _spans(reported: list[dict[str, Any]] | None) -> tuple[VersionSegment, ...] | None:
    if reported is None:
        return None
    return tuple(VersionSegment(span["start"], span["end"], int(span["version"])) for span in reported)


@dataclass
class Response:
    """The tokens of one submission that have arrived, and how many of them were delivered."""

    version: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    num_delivered: int = 0

    def add(self, event: Event) -> None:
        self.token_ids += event.token_ids
        self.log_probs += event.log_probs

    def take(self, spans: tuple[VersionSegment, ...] | None, finish_reason: FinishReason | None = None) -> TokenChunk:
        """Return the tokens that were not delivered yet. Without `spans`, all belong to the version at submission."""
        start, end = self.num_delivered, len(self.token_ids)
        self.num_delivered = end
        segments = _clip(spans if spans is not None else (VersionSegment(0, end, self.version),), start, end)
        if sum(segment.end - segment.start for segment in segments) != end - start:
            raise Unavailable(f"SGLang did not report which version produced tokens {start} to {end}: {spans}")
        return TokenChunk(tuple(self.token_ids[start:]), tuple(self.log_probs[start:]), segments, finish_reason)


def _clip(segments: Iterable[VersionSegment], start: int, end: int) -> tuple[VersionSegment, ...]:
    """Return the parts of the segments that lie in [start, end)."""
    clipped = (VersionSegment(max(s.start, start), min(s.end, end), s.policy_version) for s in segments)
    return tuple(segment for segment in clipped if segment.start < segment.end)
