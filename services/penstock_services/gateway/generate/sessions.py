"""Sessions: generate calls that are recorded token by token and become training data when they get a reward.

A session is a list in Redis with one entry per call. If the prompt of a call begins with the prompt and the answer of
an earlier call, it continues that call: both become one trajectory, in which the tokens between them are masked. Any
other call begins a group of its own. With the reward, the groups enter the queue as imported groups do: without
admission, and each once.

Every call is recorded with its sampling. If calls of one trajectory differ in temperature or top-p, the trajectory says
for each token which call sampled it, and the learner computes its log-prob at that temperature.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from penstock.codec import FINISH_FROM_PROTO, encode_group, encode_prompt, sampling_from_proto
from penstock.config.run import RunConfig
from penstock.errors import Conflict, NotFound, QueueFull
from penstock.replay.contract import Lease
from penstock.replay.inspection import QueueInspector
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.keys import RunKeys
from penstock.store.redis_errors import guarded
from penstock.trajectory import FinishReason, Group, Prompt, Sampling, SamplingSegment, Trajectory, VersionSegment
from penstock.v1 import generate_pb2

SERVER_ID = "session"
DATA_SOURCE = "session"


@dataclass
class Conversation:
    """Calls that continue each other. They become one trajectory."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    segments: list[VersionSegment] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    """The sampling of each call."""
    call_ends: list[int] = field(default_factory=list)
    """The number of tokens after each call."""
    finish_reason: FinishReason = "stop"

    def is_continued_by(self, prompt: Sequence[int]) -> bool:
        before = self.prompt_token_ids + self.token_ids
        return len(prompt) > len(before) and list(prompt[: len(before)]) == before

    def add(self, call: generate_pb2.GenerateChunk) -> None:
        prompt = _int32(call.prompt_token_ids)
        between = prompt[len(self.prompt_token_ids) + len(self.token_ids) :]
        if between:
            version = self.segments[-1].policy_version
            self._extend(between, 0, [0.0] * len(between), [VersionSegment(0, len(between), version)])
        segments = [VersionSegment(s.start, s.end, s.policy_version) for s in call.segments]
        log_probs = np.frombuffer(call.log_probs, dtype="<f4").tolist()
        self._extend(_int32(call.token_ids), 1, log_probs, segments)
        self.samplings.append(sampling_from_proto(call.sampling))
        self.call_ends.append(len(self.token_ids))
        self.finish_reason = FINISH_FROM_PROTO.get(call.finish_reason, "stop")

    def _extend(self, token_ids: list[int], mask: int, log_probs: list[float], segments: list[VersionSegment]) -> None:
        start = len(self.token_ids)
        self.token_ids += token_ids
        self.loss_mask += [mask] * len(token_ids)
        self.log_probs += log_probs
        self.segments += [VersionSegment(start + s.start, start + s.end, s.policy_version) for s in segments]

    def prompt(self) -> Prompt:
        return Prompt(token_ids=tuple(self.prompt_token_ids), sampling=self.samplings[0], data_source=DATA_SOURCE)

    def group(self, run: str, lease: Lease, reward: float, parts: Mapping[str, float]) -> Group:
        return Group(
            run=run,
            prompt_id=lease.prompt_id,
            attempt=lease.attempt,
            server_id=SERVER_ID,
            data_source=DATA_SOURCE,
            sampling=self.samplings[0],
            prompt_token_ids=np.array(self.prompt_token_ids, dtype=np.int32),
            trajectories=(self._trajectory(reward, parts),),
            finished_at_ms=int(time.time() * 1000),
        )

    def _trajectory(self, reward: float, parts: Mapping[str, float]) -> Trajectory:
        return Trajectory(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            loss_mask=np.array(self.loss_mask, dtype=np.uint8),
            log_probs=np.array(self.log_probs, dtype=np.float32),
            segments=tuple(self.segments),
            reward=reward,
            reward_parts=dict(parts),
            finish_reason=self.finish_reason,
            sampling_segments=self._sampling_segments(),
        )

    def _sampling_segments(self) -> tuple[SamplingSegment, ...]:
        """One segment for calls in a row with the same temperature and top-p, or none if all calls have the same.

        Inserted tokens belong to the call that follows them."""
        calls = [
            ((sampling.temperature, sampling.top_p), end)
            for sampling, end in zip(self.samplings, self.call_ends, strict=True)
        ]
        segments: list[SamplingSegment] = []
        for (temperature, top_p), alike in groupby(calls, key=lambda call: call[0]):
            start = segments[-1].end if segments else 0
            segments.append(SamplingSegment(start, max(end for _, end in alike), temperature, top_p))
        return tuple(segments) if len(segments) > 1 else ()


def conversations(calls: Sequence[generate_pb2.GenerateChunk]) -> list[Conversation]:
    found: list[Conversation] = []
    for call in calls:
        prompt = _int32(call.prompt_token_ids)
        continued = next((one for one in reversed(found) if one.is_continued_by(prompt)), None)
        if continued is None:
            continued = Conversation(prompt)
            found.append(continued)
        continued.add(call)
    return found


class Sessions:
    """The sessions of one run."""

    def __init__(self, config: RunConfig, queue: RedisReplayQueue) -> None:
        self.config = config
        self.queue = queue
        self.client: Any = queue.client
        self.inspector = QueueInspector(queue.client, config.run, config.replay)

    async def check_open(self, session_id: str) -> None:
        if await guarded(self.client.exists(self._rewarded(session_id))):
            raise Conflict(f"session {session_id!r} already has its reward; choose another id for new calls")

    async def record(self, session_id: str, call: generate_pb2.GenerateChunk) -> None:
        """Add a call to the session. It has the whole answer: prompt, tokens, log-probs, versions and sampling."""
        key, ttl_s = self._calls(session_id), int(self.config.gateway.session_ttl_s) or 1
        await guarded(self.client.rpush(key, call.SerializeToString()))
        await guarded(self.client.expire(key, ttl_s))

    async def reward(self, session_id: str, reward: float, parts: Mapping[str, float]) -> tuple[list[int], bool]:
        """Add the session's groups to the queue. Return their prompt ids, and whether they had been added before."""
        if known := await guarded(self.client.get(self._rewarded(session_id))):
            return json.loads(known), True
        entries = await guarded(self.client.lrange(self._calls(session_id), 0, -1))
        if not entries:
            raise NotFound(f"session {session_id!r} has no calls; send its id as X-Penstock-Session with them")
        calls = [generate_pb2.GenerateChunk.FromString(entry) for entry in entries]
        if not all(call.HasField("sampling") for call in calls):
            raise Conflict(
                f"session {session_id!r} has a call that an older gateway recorded without its temperature; record the "
                "session again under another id"
            )
        found = conversations(calls)
        leases = await self._admit(session_id, found)
        for lease, conversation in zip(leases, found, strict=True):
            if lease.attempt and await self._append(lease, conversation, reward, parts) == "full":
                raise QueueFull("the queue has no room for the session; send the reward again later")
        prompt_ids = [lease.prompt_id for lease in leases]
        ttl_s = int(self.config.gateway.session_ttl_s) or 1
        await guarded(self.client.set(self._rewarded(session_id), json.dumps(prompt_ids), ex=ttl_s))
        await guarded(self.client.unlink(self._calls(session_id)))
        return prompt_ids, False

    async def _admit(self, session_id: str, found: Sequence[Conversation]) -> list[Lease]:
        """Leases for the groups. The same session gets the same prompt ids, however often a reward is sent."""
        rows = [(index, encode_prompt(one.prompt()), 0) for index, one in enumerate(found)]
        return await self.inspector.import_prompts(
            f"session:{session_id}", SERVER_ID, self.config.replay.lease_ttl_s, rows
        )

    async def _append(self, lease: Lease, conversation: Conversation, reward: float, parts: Mapping[str, float]) -> str:
        group = conversation.group(self.config.run, lease, reward, parts)
        return await self.queue.append(lease, await asyncio.to_thread(encode_group, group), group.min_version)

    def _calls(self, session_id: str) -> str:
        return RunKeys(self.config.run).session(session_id)

    def _rewarded(self, session_id: str) -> str:
        return RunKeys(self.config.run).session(session_id, "rewarded")


def _int32(data: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(data, dtype="<i4").tolist()
    return ids
