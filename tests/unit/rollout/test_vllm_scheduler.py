"""Tests that EngineCore sends the tokens of a vLLM request in chunks, in order, and none later than a pause, and that a
request without a token gets the salt of new weights.

vLLM is not installed here: its scheduler is a stand-in that returns what the test says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from vllm_stand_ins import imported_beside

SIZE = 4
UNPAUSED, PAUSED = "unpaused", "paused"


@dataclass
class Output:
    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    finish_reason: str | None = None
    events: list[str] | None = None
    prefill_stats: str | None = None
    routed_experts: Any = None


@dataclass
class Message:
    outputs: list[Output] = field(default_factory=list)


class LogProbs(NamedTuple):
    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray


@dataclass
class Request:
    """A request whose hashes say from which salt they were computed."""

    request_id: str
    cache_salt: str
    num_output_tokens: int = 0
    status: str = "waiting"
    block_hashes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes += [f"{self.cache_salt}/{index}" for index in range(len(self.block_hashes), 2)]


class StandIn:
    """What Penstock uses of vLLM's scheduler."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting: list[str] = []
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.pause_state = UNPAUSED

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        assert request not in self.running
        request.status = "preempted"
        self.waiting.insert(0, request.request_id)

    def update_from_output(self, scheduler_output: Any, model_runner_output: list[Output]) -> dict[int, Message]:
        return {0: Message(list(model_runner_output))} if model_runner_output else {}

    def finish_requests(self, request_ids: str, finished_status: Any) -> list[Any]:
        return [SimpleNamespace(request_id=request_ids)]

    def has_requests(self) -> bool:
        return self.pause_state == UNPAUSED and bool(self.requests)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A scheduler with the request `a`, which wants SIZE tokens at once, and `b`, which wants each."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {}, "vllm.v1": {}, "vllm.v1.core": {}, "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.scheduler": {"Scheduler": StandIn},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": StandIn},
        "vllm.v1.core.sched.interface": {"PauseState": SimpleNamespace(UNPAUSED=UNPAUSED)},
        "vllm.v1.engine": {"EngineCoreOutput": Output, "EngineCoreOutputs": Message},
        "vllm.v1.request": {"RequestStatus": SimpleNamespace(RUNNING="running")},
    }  # fmt: skip
    with imported_beside(monkeypatch, "penstock_rollout.engines.vllm.scheduler", contents) as module:
        found = module.ChunkedAsyncScheduler()
        for request_id, wanted in (("a", {module.CHUNK_TOKENS: SIZE}), ("b", None)):
            parameters = SimpleNamespace(extra_args=wanted)
            found.requests[request_id] = SimpleNamespace(sampling_params=parameters, client_index=0)
        yield found


def output(request_id: str, *tokens: int, **settings: Any) -> Output:
    column = np.array(tokens)[:, None]
    return Output(request_id, list(tokens), LogProbs(column, -column / 10, column[:, 0] + 100), **settings)


def step(scheduler: Any, *outputs: Output) -> list[tuple[str, list[int]]]:
    messages = scheduler.update_from_output(None, list(outputs))
    return [(sent.request_id, sent.new_token_ids) for message in messages.values() for sent in message.outputs]


def test_the_first_token_is_sent_at_once_and_the_others_in_chunks(scheduler: Any) -> None:
    assert step(scheduler, output("a", 1, prefill_stats="read")) == [("a", [1])]
    for token in (2, 3, 4):
        assert step(scheduler, output("a", token)) == []
    assert step(scheduler, output("a", 5)) == [("a", [2, 3, 4, 5])]
    assert step(scheduler, output("a", 6)) == []


def test_a_request_that_wants_each_token_gets_it(scheduler: Any) -> None:
    assert [step(scheduler, output("b", token)) for token in (1, 2)] == [[("b", [1])], [("b", [2])]]


def test_the_end_sends_what_was_kept(scheduler: Any) -> None:
    step(scheduler, output("a", 1), output("b", 7))
    messages = scheduler.update_from_output(None, [output("a", 2, finish_reason="length")])
    (sent,) = messages[0].outputs
    assert (sent.new_token_ids, sent.finish_reason) == ([1, 2], "length")
    assert sent.new_logprobs.logprobs[:, 0].tolist() == [-0.1, -0.2]
    assert sent.new_logprobs.logprob_token_ids[:, 0].tolist() == [1, 2]
    assert sent.new_logprobs.sampled_token_ranks.tolist() == [101, 102]


def test_chunks_are_counted_in_tokens_and_keep_events_and_experts(scheduler: Any) -> None:
    step(scheduler, output("a", 1, 2, 3, events=["queued"], routed_experts=np.array([[1]])))
    (sent,) = scheduler.update_from_output(None, [output("a", 4, 5, routed_experts=np.array([[2]]))])[0].outputs
    assert sent.new_token_ids == [1, 2, 3, 4, 5]
    assert (sent.events, sent.routed_experts.tolist()) == (["queued"], [[1], [2]])


def test_a_pause_sends_every_token_even_if_no_step_is_in_flight(scheduler: Any) -> None:
    step(scheduler, output("a", 1))
    scheduler.pause_state = PAUSED
    assert scheduler.has_requests()  # so EngineCore takes one more step before it answers the pause
    assert step(scheduler) == [("a", [1])]
    assert not scheduler.has_requests()


def test_tokens_of_a_step_that_ends_during_a_pause_are_sent(scheduler: Any) -> None:
    step(scheduler, output("a", 1))
    scheduler.pause_state = PAUSED
    assert step(scheduler, output("a", 2)) == [("a", [1, 2])]


def test_tokens_of_an_aborted_request_are_dropped(scheduler: Any) -> None:
    step(scheduler, output("a", 1))
    scheduler.finish_requests("a", "aborted")
    del scheduler.requests["a"]
    scheduler.pause_state = PAUSED
    assert step(scheduler) == []


def test_requests_without_a_token_start_under_the_load_and_others_keep_their_salt(scheduler: Any) -> None:
    scheduler.requests.clear()
    kept = Request("kept", "5.0", num_output_tokens=3, status="running")
    waiting = Request("waiting", "5.0")
    begun = [Request(f"begun-{index}", "5.0", status="running") for index in range(2)]
    for request in (kept, waiting, *begun):
        scheduler.add_request(request)
    scheduler.running = [begun[0], kept, begun[1]]
    scheduler.prev_step_scheduled_req_ids = {"kept", "begun-0", "begun-1"}
    scheduler.begin_load("6.1")
    assert scheduler.running == [kept]
    assert scheduler.prev_step_scheduled_req_ids == {"kept"}
    assert scheduler.waiting == ["begun-0", "begun-1"]  # in the order in which they came
    assert kept.block_hashes == ["5.0/0", "5.0/1"]
    for request in (waiting, *begun):
        assert (request.cache_salt, request.block_hashes) == ("6.1", ["6.1/0", "6.1/1"])


def test_a_request_that_was_sent_before_the_server_heard_of_a_load_gets_its_salt(scheduler: Any) -> None:
    early, late, now = Request("early", "5.0"), Request("late", "5.0"), Request("now", "6.1")
    scheduler.add_request(early)
    assert early.cache_salt == "5.0"
    early.num_output_tokens = 1
    del scheduler.requests["a"], scheduler.requests["b"]
    scheduler.begin_load("6.1")
    scheduler.add_request(late)
    scheduler.add_request(now)
    assert [request.block_hashes[0] for request in (early, late, now)] == ["5.0/0", "6.1/0", "6.1/0"]
