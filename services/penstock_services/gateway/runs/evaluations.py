"""Evaluations of a run: held-out prompts that are scored and never trained."""

from __future__ import annotations

from penstock.config.run import RunConfig
from penstock.replay.evaluations import Evaluation
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.v1 import runs_pb2
from penstock_services.gateway import validation
from penstock_services.gateway.operations import AuditLog, operation


class EvaluationHandlers:
    def __init__(self, config: RunConfig, audit: AuditLog, queue: RedisReplayQueue) -> None:
        self.config = config
        self.audit = audit
        self.queue = queue

    @operation("submit")
    async def create_evaluation(self, request: runs_pb2.CreateEvaluationRequest) -> runs_pb2.Evaluation:
        validation.check_name("evaluation_id", request.evaluation_id)
        prompts = validation.checked_prompts(
            request.prompts, self.config.gateway.max_prompts_per_request, request.evaluation_id
        )
        payloads = [prompt.SerializeToString() for prompt in prompts]
        return _evaluation_to_proto(await self.queue.create_evaluation(request.evaluation_id, payloads))

    @operation("read")
    async def get_evaluation(self, request: runs_pb2.GetEvaluationRequest) -> runs_pb2.Evaluation:
        validation.check_name("evaluation_id", request.evaluation_id)
        return _evaluation_to_proto(await self.queue.get_evaluation(request.evaluation_id))


def _evaluation_to_proto(evaluation: Evaluation) -> runs_pb2.Evaluation:
    return runs_pb2.Evaluation(
        evaluation_id=evaluation.evaluation_id,
        num_prompts=evaluation.num_prompts,
        num_finished=evaluation.num_finished,
        score=evaluation.score,
        policy_version_min=evaluation.policy_version_min,
        policy_version_max=evaluation.policy_version_max,
        num_samples=evaluation.num_samples,
        pass_at=evaluation.pass_at,
        num_failed=evaluation.num_failed,
    )
