"""JSON of prompts, results and groups."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError

from penstock.codec import group_from_proto, prompt_from_proto
from penstock.errors import InvalidInput
from penstock.trajectory import MESSAGE_FIELDS, Prompt, Sampling, Trajectory
from penstock.v1 import groups_pb2, prompts_pb2
from penstock_services.gateway.bodies import (
    Body,
    Int32,
    Int64,
    Json,
    TokenId,
    finite,
    plain_fields,
    shortest,
    to_json_text,
)


class MessageBody(Body):
    """A message in OpenAI's format. The fields after `content` reach the model's chat template."""

    role: str
    content: str | None
    """Null only beside `tool_calls`."""
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def fill(self, message: prompts_pb2.Message) -> None:
        if self.content is None and not self.tool_calls:
            raise InvalidInput("content", "must be text, unless the message has tool_calls")
        message.role, message.content = self.role, self.content or ""
        if fields := {name: value for name in MESSAGE_FIELDS if (value := getattr(self, name)) is not None}:
            message.fields_json = to_json_text(fields, "tool_calls")


class SamplingBody(Body):
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: Int32 = 256
    seed: Int64 | None = None
    top_k: Int32 = 0
    min_p: float = 0.0
    ignore_eos: bool = False
    stop: list[str] = Field(default_factory=list)

    def fill(self, sampling: prompts_pb2.Sampling) -> None:
        sampling.temperature = self.temperature
        sampling.top_p = self.top_p
        sampling.max_tokens = self.max_tokens
        if self.seed is not None:
            sampling.seed = self.seed
        if self.top_k or self.min_p or self.ignore_eos or self.stop:
            sampling.top_k, sampling.min_p, sampling.ignore_eos = self.top_k, self.min_p, self.ignore_eos
            sampling.stop.extend(self.stop)


class PromptBody(Body):
    messages: list[MessageBody] = Field(default_factory=list)
    token_ids: list[TokenId] = Field(default_factory=list)
    sampling: SamplingBody = SamplingBody()
    num_samples: Int32 = 1
    agent_name: str = ""
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = Field(default_factory=dict)
    priority: Int32 = 0

    def fill(self, prompt: prompts_pb2.Prompt) -> None:
        """Fill in a prompt of a request. Building a message first and copying it there costs twice as much."""
        for index, message in enumerate(self.messages):
            try:
                message.fill(prompt.messages.add())
            except InvalidInput as error:
                raise error.under(f"messages[{index}]") from error
        if self.token_ids:
            prompt.token_ids = np.asarray(self.token_ids, dtype="<i4").tobytes()
        self.sampling.fill(prompt.sampling)
        prompt.num_samples = self.num_samples
        prompt.agent_name = self.agent_name
        prompt.data_source = self.data_source
        prompt.ground_truth_json = to_json_text(self.ground_truth, "ground_truth")
        prompt.extra_info_json = to_json_text(self.extra_info, "extra_info")
        prompt.priority = self.priority


class SubmitPromptsBody(Body):
    prompts: list[PromptBody]
    idempotency_key: str = ""
    prompt_keys: list[str] = Field(default_factory=list)

    @classmethod
    def parse(cls, data: bytes) -> SubmitPromptsBody:
        """Parse the bytes directly, at a tenth of the cost of building a dictionary first."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            details = [detail | {"loc": ("body", *detail["loc"])} for detail in error.errors(include_url=False)]
            raise RequestValidationError(details) from error

    def to_proto(self, run: str, header_key: str) -> prompts_pb2.SubmitPromptsRequest:
        """The idempotency key may be in the body, in the header, or in both if they agree."""
        if self.idempotency_key and header_key and self.idempotency_key != header_key:
            raise InvalidInput("idempotency_key", "differs from the Idempotency-Key header; send one of them")
        key = self.idempotency_key or header_key
        request = prompts_pb2.SubmitPromptsRequest(run=run, idempotency_key=key, prompt_keys=self.prompt_keys)
        fill_prompts(request.prompts, self.prompts)
        return request


class CancelPromptsBody(Body):
    prompt_ids: list[Int64]


def submission_to_json(response: prompts_pb2.SubmitPromptsResponse) -> Json:
    return {
        "prompt_ids": list(response.prompt_ids),
        "replayed": response.replayed,
        "num_replayed": response.num_replayed,
    }


def prompt_record_to_json(record: prompts_pb2.PromptRecord) -> Json:
    prompt = _prompt_body(prompt_from_proto(record.prompt)) if record.HasField("prompt") else None
    return {
        "prompt_id": record.prompt_id,
        "state": prompts_pb2.PromptRecord.State.Name(record.state),
        "attempt": record.attempt,
        "prompt": prompt,
    }


def group_to_json(message: groups_pb2.Group) -> Json:
    group = group_from_proto(message)
    return {
        "run": group.run,
        "prompt_id": group.prompt_id,
        "attempt": group.attempt,
        "server_id": group.server_id,
        "data_source": group.data_source,
        "agent_name": group.agent_name,
        "sampling": sampling_to_json(group.sampling),
        "prompt_token_ids": group.prompt_token_ids.tolist(),
        "trajectories": [
            _trajectory_to_json(trajectory)
            | {
                "text": sent.text,
                "tokens": list(sent.tokens),
                "learner_log_probs": np.frombuffer(sent.learner_log_probs, dtype="<f4").tolist(),
            }
            for trajectory, sent in zip(group.trajectories, message.trajectories, strict=True)
        ],
        "finished_at_ms": group.finished_at_ms,
    }


def prompts_to_json(response: prompts_pb2.ListPromptsResponse) -> Json:
    return {
        "prompts": [prompt_record_to_json(record) for record in response.prompts],
        "next_page_token": response.next_page_token,
    }


def cancelled_to_json(response: prompts_pb2.CancelPromptsResponse) -> Json:
    return {"prompts": [prompt_record_to_json(record) for record in response.prompts]}


def groups_to_json(response: groups_pb2.ListGroupsResponse) -> Json:
    groups = [plain_fields(group) | finite({"mean_reward": group.mean_reward}) for group in response.groups]
    return {"groups": groups, "next_page_token": response.next_page_token}


def result_to_json(result: prompts_pb2.Result) -> Json:
    group = group_to_json(groups_pb2.Group.FromString(result.group)) if result.group else None
    return plain_fields(result) | {"state": prompts_pb2.PromptRecord.State.Name(result.state), "group": group}


def _trajectory_to_json(trajectory: Trajectory) -> Json:
    return {
        "token_ids": trajectory.token_ids.tolist(),
        "loss_mask": trajectory.loss_mask.tolist(),
        "log_probs": trajectory.log_probs.tolist(),
        "policy_versions": trajectory.token_versions().tolist(),
        "reward": trajectory.reward,
        "reward_parts": finite(trajectory.reward_parts),
        "reward_failed": trajectory.reward_failed,
        "finish_reason": trajectory.finish_reason,
        "is_baseline": trajectory.is_baseline,
        "sampling_segments": [
            asdict(call) | {"temperature": shortest(call.temperature), "top_p": shortest(call.top_p)}
            for call in trajectory.sampling_segments
        ],
    }


def _prompt_body(prompt: Prompt) -> Json:
    return {
        "messages": prompt.chat,
        "token_ids": list(prompt.token_ids),
        "sampling": sampling_to_json(prompt.sampling),
        "num_samples": prompt.num_samples,
        "agent_name": prompt.agent_name,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
        "priority": prompt.priority,
        "evaluation_id": prompt.evaluation_id,
    }


def sampling_to_json(sampling: Sampling) -> Json:
    return {
        "temperature": shortest(sampling.temperature),
        "top_p": shortest(sampling.top_p),
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "top_k": sampling.top_k,
        "min_p": shortest(sampling.min_p),
        "ignore_eos": sampling.ignore_eos,
        "stop": list(sampling.stop),
    }


def fill_prompts(into: MutableSequence[prompts_pb2.Prompt], prompts: Sequence[PromptBody]) -> None:
    add = into.add  # type: ignore[attr-defined]
    for index, prompt in enumerate(prompts):
        try:
            prompt.fill(add())
        except InvalidInput as error:
            raise error.under(f"prompts[{index}]") from error
