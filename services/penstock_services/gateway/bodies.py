"""JSON of the REST interface: request bodies become protobuf, protobuf becomes response bodies.

Bodies carry natural JSON types: lists of numbers where protobuf has bytes, values where it has JSON text, integers
where its own JSON mapping has strings. Numbers that JSON cannot carry (NaN, infinities) are null.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from penstock.codec import group_from_proto, prompt_from_proto
from penstock.errors import InvalidInput
from penstock.trajectory import Prompt, Sampling, Trajectory
from penstock.v1 import groups_pb2, policies_pb2, prompts_pb2, runs_pb2

Json = dict[str, Any]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MessageBody(Body):
    role: str
    content: str


class SamplingBody(Body):
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: Int32 = 256
    seed: Int64 | None = None

    def to_proto(self) -> prompts_pb2.Sampling:
        return prompts_pb2.Sampling(
            temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens, seed=self.seed
        )


class PromptBody(Body):
    messages: list[MessageBody] = []
    token_ids: list[TokenId] = []
    sampling: SamplingBody = SamplingBody()
    num_samples: Int32 = 1
    agent_name: str = ""
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}
    priority: Int32 = 0

    def to_proto(self, path: str) -> prompts_pb2.Prompt:
        return prompts_pb2.Prompt(
            messages=[prompts_pb2.Message(role=m.role, content=m.content) for m in self.messages],
            token_ids=np.asarray(self.token_ids, dtype="<i4").tobytes(),
            sampling=self.sampling.to_proto(),
            num_samples=self.num_samples,
            agent_name=self.agent_name,
            data_source=self.data_source,
            ground_truth_json=_to_json(self.ground_truth, f"{path}.ground_truth"),
            extra_info_json=_to_json(self.extra_info, f"{path}.extra_info"),
            priority=self.priority,
        )


class SubmitPromptsBody(Body):
    prompts: list[PromptBody]
    idempotency_key: str = ""

    def to_proto(self, run: str, header_key: str) -> prompts_pb2.SubmitPromptsRequest:
        """The key may stand in the body or in the header; when both do they must agree."""
        if self.idempotency_key and header_key and self.idempotency_key != header_key:
            raise InvalidInput("idempotency_key", "differs from the Idempotency-Key header; send one of them")
        return prompts_pb2.SubmitPromptsRequest(
            run=run, idempotency_key=self.idempotency_key or header_key, prompts=_prompts_to_proto(self.prompts)
        )


class CreateEvaluationBody(Body):
    evaluation_id: str
    prompts: list[PromptBody]

    def to_proto(self, run: str) -> runs_pb2.CreateEvaluationRequest:
        return runs_pb2.CreateEvaluationRequest(
            run=run, evaluation_id=self.evaluation_id, prompts=_prompts_to_proto(self.prompts)
        )


def submission_to_json(response: prompts_pb2.SubmitPromptsResponse) -> Json:
    return {"prompt_ids": list(response.prompt_ids), "replayed": response.replayed}


def prompt_record_to_json(record: prompts_pb2.PromptRecord) -> Json:
    prompt = _prompt_to_json(prompt_from_proto(record.prompt)) if record.HasField("prompt") else None
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
        "sampling": _sampling_to_json(group.sampling),
        "prompt_token_ids": group.prompt_token_ids.tolist(),
        "trajectories": [_trajectory_to_json(trajectory) for trajectory in group.trajectories],
        "finished_at_ms": group.finished_at_ms,
    }


def policy_to_json(policy: policies_pb2.Policy) -> Json:
    return {
        "policy_version": policy.policy_version,
        "step": policy.step,
        "parent_version": policy.parent_version if policy.HasField("parent_version") else None,
        "published_at_ms": policy.published_at_ms,
        "weights_digest": policy.weights_digest,
        "snapshot_path": policy.snapshot_path,
        "state": policies_pb2.Policy.State.Name(policy.state),
        "metrics": _finite(dict(policy.metrics)),
        "server_ids": list(policy.server_ids),
    }


def policies_to_json(response: policies_pb2.ListPoliciesResponse) -> Json:
    return {
        "policies": [policy_to_json(policy) for policy in response.policies],
        "next_page_token": response.next_page_token,
    }


def run_to_json(run: runs_pb2.Run) -> Json:
    return {
        "run": run.run,
        "step": run.step,
        "policy_version": run.policy_version,
        "term": run.term,
        "queue": {field.name: getattr(run.queue, field.name) for field in run.queue.DESCRIPTOR.fields},
        "metrics": _finite(dict(run.metrics)),
        "servers": [_server_to_json(server) for server in run.servers],
    }


def servers_to_json(response: runs_pb2.ListServersResponse) -> Json:
    return {"servers": [_server_to_json(server) for server in response.servers], "generation": response.generation}


def evaluation_to_json(evaluation: runs_pb2.Evaluation) -> Json:
    fields = {field.name: getattr(evaluation, field.name) for field in evaluation.DESCRIPTOR.fields}
    return fields | {"pass_at": {str(k): share for k, share in sorted(evaluation.pass_at.items())}}


def _server_to_json(server: runs_pb2.Server) -> Json:
    fields = {field.name: getattr(server, field.name) for field in server.DESCRIPTOR.fields}
    return fields | {"state": runs_pb2.Server.State.Name(server.state)}


def _trajectory_to_json(trajectory: Trajectory) -> Json:
    return {
        "token_ids": trajectory.token_ids.tolist(),
        "loss_mask": trajectory.loss_mask.tolist(),
        "log_probs": trajectory.log_probs.tolist(),
        "policy_versions": trajectory.token_versions().tolist(),
        "reward": trajectory.reward,
        "reward_parts": _finite(trajectory.reward_parts),
        "finish_reason": trajectory.finish_reason,
        "is_baseline": trajectory.is_baseline,
    }


def _prompt_to_json(prompt: Prompt) -> Json:
    return {
        "messages": [{"role": role, "content": content} for role, content in prompt.messages],
        "token_ids": list(prompt.token_ids),
        "sampling": _sampling_to_json(prompt.sampling),
        "num_samples": prompt.num_samples,
        "agent_name": prompt.agent_name,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
        "priority": prompt.priority,
        "evaluation_id": prompt.evaluation_id,
    }


def _sampling_to_json(sampling: Sampling) -> Json:
    return {
        "temperature": _shortest(sampling.temperature),
        "top_p": _shortest(sampling.top_p),
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
    }


def _shortest(value: float) -> float:
    """A float32 as the number its sender wrote: 0.7, not 0.699999988079071."""
    return float(str(np.float32(value)))


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _prompts_to_proto(prompts: list[PromptBody]) -> list[prompts_pb2.Prompt]:
    return [prompt.to_proto(f"prompts[{index}]") for index, prompt in enumerate(prompts)]


def _to_json(value: Any, path: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(path, f"is not valid JSON: {error}") from error
