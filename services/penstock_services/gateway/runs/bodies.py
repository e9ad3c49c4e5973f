"""JSON of runs, their servers, evaluations and dead letters."""

from __future__ import annotations

from penstock.v1 import runs_pb2
from penstock_services.gateway.bodies import Body, Json, finite, plain_fields
from penstock_services.gateway.prompts.bodies import PromptBody, fill_prompts


class CreateEvaluationBody(Body):
    evaluation_id: str
    prompts: list[PromptBody]

    def to_proto(self, run: str) -> runs_pb2.CreateEvaluationRequest:
        request = runs_pb2.CreateEvaluationRequest(run=run, evaluation_id=self.evaluation_id)
        fill_prompts(request.prompts, self.prompts)
        return request


def run_to_json(run: runs_pb2.Run) -> Json:
    return {
        "run": run.run,
        "step": run.step,
        "policy_version": run.policy_version,
        "term": run.term,
        "queue": plain_fields(run.queue),
        "metrics": finite(dict(run.metrics)),
        "servers": [server_to_json(server) for server in run.servers],
        "state": runs_pb2.Run.State.Name(run.state),
        "held_version": run.held_version if run.HasField("held_version") else None,
        "detail": run.detail,
        "num_trained": run.num_trained,
        "learning": run.learning,
        "speed": run.speed,
        "learning_verdict": verdict_to_json(run.learning_verdict) if run.HasField("learning_verdict") else None,
        "speed_verdict": verdict_to_json(run.speed_verdict) if run.HasField("speed_verdict") else None,
        "parts": [
            {"component": part.component, "phases": [plain_fields(phase) for phase in part.phases]}
            for part in run.parts
        ],
        "notices": [plain_fields(notice) for notice in run.notices],
    }


def verdict_to_json(verdict: runs_pb2.Verdict) -> Json:
    return plain_fields(verdict) | {"level": runs_pb2.Verdict.Level.Name(verdict.level)}


def servers_to_json(response: runs_pb2.ListServersResponse) -> Json:
    return {"servers": [server_to_json(server) for server in response.servers]}


def evaluation_to_json(evaluation: runs_pb2.Evaluation) -> Json:
    return plain_fields(evaluation) | {"pass_at": {str(k): share for k, share in sorted(evaluation.pass_at.items())}}


def server_to_json(server: runs_pb2.Server) -> Json:
    return plain_fields(server) | {"state": runs_pb2.Server.State.Name(server.state)}


def metrics_to_json(response: runs_pb2.ListMetricsResponse) -> Json:
    steps = [plain_fields(step) | {"metrics": finite(dict(step.metrics))} for step in response.steps]
    return {"steps": steps, "scores": [plain_fields(score) for score in response.scores]}


def runs_to_json(response: runs_pb2.ListRunsResponse) -> Json:
    return {"runs": [run_to_json(run) for run in response.runs]}


def dead_letters_to_json(response: runs_pb2.ListDeadLettersResponse) -> Json:
    letters = [plain_fields(letter) for letter in response.dead_letters]
    return {
        "dead_letters": letters,
        "next_page_token": response.next_page_token,
        "reasons": dict(sorted(response.reasons.items())),
    }
