"""Groups that wait in the queue, read whole or as summaries, and trained samples as text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penstock.api import records
from penstock.api.conversion import message_of
from penstock.codec import decode_group, group_to_proto
from penstock.errors import InvalidInput, NotFound
from penstock.replay.inspection import QueueInspector
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.results import RecomputedLogProbs
from penstock.samples import VALIDATED, Order, Place, Range, Sample, SampleFilter, SamplesFound, TokenText, page, select
from penstock.store.ownership import Owner
from penstock.trajectory import Group
from penstock.v1 import groups_pb2, prompts_pb2
from penstock_services.gateway import checks
from penstock_services.gateway.access import Caller
from penstock_services.gateway.operations import Handlers, operation

MAX_GROUPS_READ = 2_000
"""Groups that one request reads. Their text may be many megabytes."""
_ORDERS: dict[int, Order] = dict(enumerate(get_args(Order)))
Number = Annotated[int, Field(ge=0, lt=2**63)] | None


class ListSamples(records.Page):
    order: str = ""
    min_step: Number = None
    max_step: Number = None
    min_reward: float | None = None
    max_reward: float | None = None
    prompt_id: Number = None
    data_source: str = ""
    text: str = ""
    validation: bool = False


async def usable_prompts(queue: RedisReplayQueue, prompt_ids: Sequence[int], owner: Owner) -> set[int]:
    """The prompts that the owner may use. One without a payload has ended, or will be submitted by anyone."""
    if owner.sees_all:
        return set(prompt_ids)
    found = zip(prompt_ids, await queue.prompts(prompt_ids), strict=True)
    return {prompt_id for prompt_id, data in found if data and owner.may_use(prompts_pb2.Prompt.FromString(data).owner)}


class GroupReader:
    """Reads queued groups of one run. Decoding and adding texts run in a thread, because a group may be large."""

    def __init__(self, run: str, queue: RedisReplayQueue, texts: TokenText) -> None:
        self.queue = queue
        self.inspector = QueueInspector(queue.client, run, queue.config)
        self.texts = texts
        self.recomputed = RecomputedLogProbs(queue.client, run)

    async def get(self, prompt_id: int, owner: Owner) -> groups_pb2.Group:
        if not await usable_prompts(self.queue, [prompt_id], owner):
            raise NotFound(f"no group of prompt {prompt_id} is queued; it is not finished, or already trained")
        payload = await self.queue.get_group(prompt_id)
        return await self.with_details(await asyncio.to_thread(decode_group, payload))

    async def decoded(self, prompt_ids: Sequence[int]) -> list[Group]:
        """The groups of these prompts that are queued and can be decoded."""
        return [found.group for found in await self.inspector.groups(prompt_ids) if found.group is not None]

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


@dataclass
class GroupHandlers(Handlers):
    groups: GroupReader

    @operation("GET", "groups/{prompt_id}", "read", records.Group)
    async def get_group(self, caller: Caller, request: groups_pb2.GetGroupRequest) -> groups_pb2.Group:
        """Return a queued group with every token of its trajectories."""
        checks.prompt_id(request.prompt_id)
        return await self.groups.get(request.prompt_id, caller.owner)

    @operation("GET", "groups", "read", records.GroupPage, takes=records.Page)
    async def list_groups(self, caller: Caller, request: groups_pb2.ListGroupsRequest) -> groups_pb2.ListGroupsResponse:
        """List the queued groups. A page may be short or empty and still have a next page."""
        page_size = checks.page_size(request.page_size)
        after = checks.page_position("groups", request.page_token, "[01][.][0-9]{1,10}") or "0.0"
        place, _, last_id = after.partition(".")
        waiting, taken = await self.groups.queue.waiting(), await self.groups.queue.taken()
        places = [(0, prompt_id) for prompt_id in waiting - taken] + [(1, prompt_id) for prompt_id in taken]
        left = sorted(found for found in places if found > (int(place), int(last_id)))
        shown, token = checks.cut_page("groups", left, page_size, lambda found: f"{found[0]}.{found[1]}")
        answer = groups_pb2.ListGroupsResponse(next_page_token=token)
        usable = await usable_prompts(self.groups.queue, [prompt_id for _, prompt_id in shown], caller.owner)
        for group in await self.groups.decoded([prompt_id for _, prompt_id in shown if prompt_id in usable]):
            counts = {"num_trajectories": len(group.trajectories), "num_tokens": group.num_response_tokens}
            summary = message_of(groups_pb2.GroupSummary, group, is_taken=group.prompt_id in taken, **counts)
            answer.groups.append(summary)
        return answer

    @operation("GET", "samples", "read", records.SamplePage, takes=ListSamples)
    async def list_samples(
        self, caller: Caller, request: groups_pb2.ListSamplesRequest
    ) -> groups_pb2.ListSamplesResponse:
        """List trained samples, or those of validations, as text: newest first, or by `order` (WORST or BEST). Bounds
        are included."""
        page_size = checks.page_size(request.page_size)
        token = checks.page_position("samples", request.page_token, r"[0-9]{1,20}\.[0-9]{1,20}\.[0-9]{0,20}")
        after = Place.parse(token) if token else None
        if request.order not in _ORDERS:
            raise InvalidInput("order", f"{request.order} is not the number of an order of ListSamplesRequest")
        wanted, order = _filter(request, caller.owner), _ORDERS[request.order]
        found = await asyncio.to_thread(self._read, request.validation, wanted, order, page_size, after)
        next_token = checks.page_token("samples", str(found.next_place)) if found.next_place else ""
        return groups_pb2.ListSamplesResponse(samples=map(_to_proto, found.samples), next_page_token=next_token)

    def _read(
        self, validation: bool, wanted: SampleFilter, order: Order, page_size: int, after: Place | None
    ) -> SamplesFound:
        folder = (self.config.gateway.samples_dir or self.config.run_dir) / self.config.run
        folder /= VALIDATED if validation else ""
        if order == "newest":
            return page(folder, wanted, page_size, after, MAX_GROUPS_READ)
        return SamplesFound(select(folder, wanted, page_size, order, MAX_GROUPS_READ), None)


def _filter(request: groups_pb2.ListSamplesRequest, owner: Owner) -> SampleFilter:
    def bound(name: str) -> float | None:
        return getattr(request, name) if request.HasField(name) else None

    return SampleFilter(
        steps=Range(bound("min_step"), bound("max_step")), rewards=Range(bound("min_reward"), bound("max_reward")),
        prompt_id=request.prompt_id if request.HasField("prompt_id") else None, data_source=request.data_source,
        text=request.text, owner=owner,
    )  # fmt: skip


def _to_proto(sample: Sample) -> groups_pb2.Sample:
    return message_of(
        groups_pb2.Sample,
        sample,
        ground_truth_json=json.dumps(sample.ground_truth),
        reward_parts={name: float("nan") if value is None else value for name, value in sample.reward_parts.items()},
    )
