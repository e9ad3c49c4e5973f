"""Groups that wait in the queue: read whole, with text where the tokenizer is known, or as summaries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.codec import decode_group, group_to_proto
from penstock.config.run import RunConfig
from penstock.errors import NotFound, PoisonGroup
from penstock.replay.queue_types import Delivery
from penstock.replay.recomputed import RecomputedLogProbs
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.token_text import TokenText
from penstock.trajectory import Group
from penstock.v1 import groups_pb2
from penstock_services.gateway import validation
from penstock_services.gateway.operations import AuditLog, operation


class GroupReader:
    """Reads queued groups of one run. Decoding and adding texts run in a thread, because a group may be large."""

    def __init__(self, run: str, queue: RedisReplayQueue, texts: TokenText) -> None:
        self.queue = queue
        self.texts = texts
        self.recomputed = RecomputedLogProbs(queue.client, run)

    async def get(self, prompt_id: int) -> groups_pb2.Group:
        payload = await self.queue.get_group(prompt_id)
        return await self.with_details(await asyncio.to_thread(decode_group, payload))

    async def decoded(self, prompt_ids: Sequence[int]) -> list[Group]:
        """The groups of these prompts that are queued and can be decoded."""
        deliveries = await self.queue.fetch(prompt_ids)
        groups = [await asyncio.to_thread(_decode, delivery) for delivery in deliveries]
        return [group for group in groups if group is not None]

    async def with_details(self, group: Group) -> groups_pb2.Group:
        """The group with the text of its tokens and the learner's log-probs, where they are known."""
        return await asyncio.to_thread(self._describe, group, await self.recomputed.get(group))

    def _describe(self, group: Group, recomputed: Sequence[NDArray[np.float32]]) -> groups_pb2.Group:
        message = group_to_proto(group)
        for sent in message.trajectories:
            sent.ClearField("routed_experts")  # many times larger than the rest, and of use to the learner only
        for sent, log_probs in zip(message.trajectories, recomputed, strict=False):
            sent.learner_log_probs = log_probs.astype("<f4").tobytes()
        self.texts.fill(message, [trajectory.token_ids.tolist() for trajectory in group.trajectories])
        return message


class GroupHandlers:
    def __init__(self, config: RunConfig, audit: AuditLog, groups: GroupReader) -> None:
        self.config = config
        self.audit = audit
        self.groups = groups

    @operation("read")
    async def get_group(self, request: groups_pb2.GetGroupRequest) -> groups_pb2.Group:
        if not 1 <= request.prompt_id <= validation.MAX_PROMPT_ID:
            raise NotFound(f"prompt {request.prompt_id} does not exist")
        return await self.groups.get(request.prompt_id)

    @operation("read")
    async def list_groups(self, request: groups_pb2.ListGroupsRequest) -> groups_pb2.ListGroupsResponse:
        page_size = validation.checked_page_size(request.page_size)
        after = validation.decode_page_token("groups", request.page_token, "[01][.][0-9]{1,10}") or "0.0"
        place, _, last_id = after.partition(".")
        waiting, taken = await self.groups.queue.waiting(), await self.groups.queue.taken()
        places = [(0, prompt_id) for prompt_id in waiting - taken] + [(1, prompt_id) for prompt_id in taken]
        left = sorted(found for found in places if found > (int(place), int(last_id)))
        shown = left[:page_size]
        groups = await self.groups.decoded([prompt_id for _, prompt_id in shown])
        token = ""
        if len(left) > page_size:
            token = validation.encode_page_token("groups", f"{shown[-1][0]}.{shown[-1][1]}")
        summaries = [_summary(group, group.prompt_id in taken) for group in groups]
        return groups_pb2.ListGroupsResponse(groups=summaries, next_page_token=token)


def _decode(delivery: Delivery) -> Group | None:
    """None for a group that the learner will dead-letter."""
    try:
        return decode_group(delivery.payload)
    except PoisonGroup:
        return None


def _summary(group: Group, is_taken: bool) -> groups_pb2.GroupSummary:
    return groups_pb2.GroupSummary(
        prompt_id=group.prompt_id,
        attempt=group.attempt,
        server_id=group.server_id,
        data_source=group.data_source,
        num_trajectories=len(group.trajectories),
        num_tokens=group.num_response_tokens,
        mean_reward=group.mean_reward,
        min_version=group.min_version,
        max_version=group.max_version,
        finished_at_ms=group.finished_at_ms,
        is_taken=is_taken,
    )
