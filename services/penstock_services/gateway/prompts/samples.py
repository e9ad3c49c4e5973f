"""Trained samples as text, read from the files that the learner writes to the run's folder."""

from __future__ import annotations

import asyncio
import json
from typing import get_args

from penstock.config.run import RunConfig
from penstock.errors import InvalidInput
from penstock.samples.files import Place
from penstock.samples.sample import Sample
from penstock.samples.selection import Order, Range, SampleFilter, SamplePage, page, select
from penstock.v1 import groups_pb2
from penstock_services.gateway import validation
from penstock_services.gateway.bodies import Json, finite, plain_fields
from penstock_services.gateway.operations import AuditLog, operation

GROUPS_LOOKED_AT = 2_000
"""Groups that one request reads. Their text may be many megabytes."""
_ORDERS: dict[int, Order] = dict(enumerate(get_args(Order)))


class SampleHandlers:
    def __init__(self, config: RunConfig, audit: AuditLog) -> None:
        self.config = config
        self.audit = audit

    @operation("read")
    async def list_samples(self, request: groups_pb2.ListSamplesRequest) -> groups_pb2.ListSamplesResponse:
        page_size = validation.checked_page_size(request.page_size)
        token = validation.decode_page_token("samples", request.page_token, r"[0-9]{1,20}\.[0-9]{1,20}\.[0-9]{0,20}")
        after = Place.parse(token) if token else None
        if request.order not in _ORDERS:
            raise InvalidInput("order", f"{request.order} is not the number of an order of ListSamplesRequest")
        wanted, order = _filter(request), _ORDERS[request.order]
        found = await asyncio.to_thread(self._read, wanted, order, page_size, after)
        next_token = validation.encode_page_token("samples", str(found.next_place)) if found.next_place else ""
        samples = [_to_proto(sample) for sample in found.samples]
        return groups_pb2.ListSamplesResponse(samples=samples, next_page_token=next_token)

    def _read(self, wanted: SampleFilter, order: Order, page_size: int, after: Place | None) -> SamplePage:
        folder = (self.config.gateway.samples_dir or self.config.run_dir) / self.config.run
        if order == "newest":
            return page(folder, wanted, page_size, after, GROUPS_LOOKED_AT)
        return SamplePage(select(folder, wanted, page_size, order, GROUPS_LOOKED_AT), None)


def samples_to_json(response: groups_pb2.ListSamplesResponse) -> Json:
    return {
        "samples": [_sample_to_json(sample) for sample in response.samples],
        "next_page_token": response.next_page_token,
    }


def _sample_to_json(sample: groups_pb2.Sample) -> Json:
    fields = plain_fields(sample)
    truth = fields.pop("ground_truth_json")
    return fields | {
        "ground_truth": json.loads(truth or "null"),
        "reward": sample.reward if sample.HasField("reward") else None,
        "reward_parts": finite(dict(sample.reward_parts)),
    }


def _filter(request: groups_pb2.ListSamplesRequest) -> SampleFilter:
    def bound(name: str) -> float | None:
        return getattr(request, name) if request.HasField(name) else None

    return SampleFilter(
        steps=Range(bound("min_step"), bound("max_step")),
        rewards=Range(bound("min_reward"), bound("max_reward")),
        prompt_id=request.prompt_id if request.HasField("prompt_id") else None,
        data_source=request.data_source,
        text=request.text,
    )


def _to_proto(sample: Sample) -> groups_pb2.Sample:
    return groups_pb2.Sample(
        step=sample.step,
        policy_version=sample.policy_version,
        prompt_id=sample.prompt_id,
        sample=sample.sample,
        data_source=sample.data_source,
        prompt=sample.prompt,
        ground_truth_json=json.dumps(sample.ground_truth),
        response=sample.response,
        reward=sample.reward,
        reward_parts={name: float("nan") if value is None else value for name, value in sample.reward_parts.items()},
        num_tokens=sample.num_tokens,
        min_version=sample.min_version,
        max_version=sample.max_version,
        finish_reason=sample.finish_reason,
        is_baseline=sample.is_baseline,
        server_id=sample.server_id,
        agent_name=sample.agent_name,
        attempt=sample.attempt,
        finished_at_ms=sample.finished_at_ms,
        reward_failed=sample.reward_failed,
    )
