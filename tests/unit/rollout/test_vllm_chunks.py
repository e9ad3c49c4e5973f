"""Tests that EngineCore sends the tokens of a vLLM request in chunks, in order, and none later than a pause, and that a
request without a token gets the salt of new weights.

vLLM is not installed here: its scheduler is a stand-in that returns what the test says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from support.vllm_stand_ins import imported_core

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
    cu_num_generated_tokens: list[int] | None = None

    def slice_request(self, index: int, num_tokens: int) -> LogProbs:
        first = index if self.cu_num_generated_tokens is None else self.cu_num_generated_tokens[index]
        ids, values, ranks, _ = self
        return LogProbs(*(each[first : first + num_tokens] for each in (ids, values, ranks)))


@dataclass
class Step:
    """What the model returns: outputs without log-probs, and the log-probs of all."""

    outputs: list[Output]
    logprobs: Any = None


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

    def update_from_output(self, scheduler_output: Any, model_runner_output: Step) -> dict[int, Message]:
        for index, made in enumerate(model_runner_output.outputs):
            made.new_logprobs = model_runner_output.logprobs.slice_request(index, len(made.new_token_ids))
        return {0: Message(list(model_runner_output.outputs))} if model_runner_output.outputs else {}

    def finish_requests(self, request_ids: str, finished_status: Any) -> list[Any]:
        return [SimpleNamespace(request_id=request_ids)]

    def has_requests(self) -> bool:
        return self.pause_state == UNPAUSED and bool(self.requests)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A scheduler with the request `a`, which wants SIZE tokens at once, and `b`, which wants each."""
    values: dict[str, Any] = {
        "Scheduler": StandIn, "AsyncScheduler": StandIn, "PauseState": SimpleNamespace(UNPAUSED=UNPAUSED),
        "EngineCoreOutput": Output, "EngineCoreOutputs": Message, "RequestStatus": SimpleNamespace(RUNNING="running"),
    }  # fmt: skip
    with imported_core(monkeypatch, **values) as module:
        found = module.ChunkedAsyncScheduler()
        for request_id, wanted in (("a", {module.CHUNK_TOKENS: SIZE}), ("b", None)):
            parameters = SimpleNamespace(extra_args=wanted)
            found.requests[request_id] = SimpleNamespace(sampling_params=parameters, client_index=0)
        yield found


def output(request_id: str, *tokens: int, **settings: Any) -> Output:
    return Output(request_id, list(tokens), **settings)


def sent_of(scheduler: Any, *outputs: Output, num_columns: int = 1) -> list[Output]:
    """What is sent after a step with these outputs. The log-prob of a token is a tenth of its id, negative, and its
    rank is its id and 100."""
    tokens = [token for made in outputs for token in made.new_token_ids]
    starts = [0, *itertools.accumulate(len(made.new_token_ids) for made in outputs)]
    column = np.array(tokens, np.int32)[:, None].repeat(num_columns, 1)
    are_single = starts == list(range(len(outputs) + 1))
    table = LogProbs(column, column.astype(np.float32) / -10, column[:, 0] + 100, None if are_single else starts)
    messages = scheduler.update_from_output(None, Step(list(outputs), table if outputs else None))
    return [sent for message in messages.values() for sent in message.outputs]


def step(scheduler: Any, *outputs: Output, num_columns: int = 1) -> list[tuple[str, list[int]]]:
    found = sent_of(scheduler, *outputs, num_columns=num_columns)
    for sent in found:
        ids, values, ranks, starts = sent.new_logprobs
        assert ids[:, 0].tolist() == sent.new_token_ids
        assert values[:, 0].tolist() == (np.array(sent.new_token_ids, np.float32) / -10).tolist()
        assert ranks.tolist() == [token + 100 for token in sent.new_token_ids]
        assert (ids.dtype, values.dtype, ranks.dtype, starts) == (np.int32, np.float32, np.int32, None)
    return [(sent.request_id, sent.new_token_ids) for sent in found]


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
    (sent,) = sent_of(scheduler, output("a", 2, finish_reason="length"))
    assert (sent.new_token_ids, sent.finish_reason) == ([1, 2], "length")


def test_each_request_has_its_own_log_probs(scheduler: Any) -> None:
    scheduler.requests["c"] = scheduler.requests["a"]
    for number in range(1, SIZE):
        assert step(scheduler, output("c", 20 + number), output("b", number), output("a", 10 + number)) == [
            ("b", [number])
        ]
    sent = step(scheduler, output("a", 10 + SIZE), output("c", 20 + SIZE))
    assert sent == [("a", [11, 12, 13, 14]), ("c", [21, 22, 23, 24])]


def test_chunks_are_counted_in_tokens_and_keep_events_and_experts(scheduler: Any) -> None:
    step(scheduler, output("a", 1, 2, 3, events=["queued"], routed_experts=np.array([[1]])), output("b", 9))
    (sent,) = sent_of(scheduler, output("a", 4, routed_experts=np.array([[2]])))
    assert sent.new_token_ids == [1, 2, 3, 4]
    assert (sent.events, sent.routed_experts.tolist()) == (["queued"], [[1], [2]])


def test_steps_with_one_and_with_several_tokens_are_joined(scheduler: Any) -> None:
    assert step(scheduler, output("b", 8, 9), output("a", 1)) == [("b", [8, 9])]
    assert step(scheduler, output("b", 7), output("a", 2, 3)) == [("b", [7])]
    assert step(scheduler, output("a", 4)) == [("a", [1, 2, 3, 4])]


def test_log_probs_of_more_than_the_sampled_token_stay_as_they_are(scheduler: Any) -> None:
    (sent,) = sent_of(scheduler, output("b", 5), num_columns=3)
    assert sent.new_logprobs.logprobs.shape == (1, 3)
    for token in range(1, SIZE):
        assert step(scheduler, output("a", token), num_columns=3) == []
    assert step(scheduler, output("a", SIZE)) == [("a", [1, 2, 3, 4])]


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
