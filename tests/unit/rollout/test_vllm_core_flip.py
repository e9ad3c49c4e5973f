"""Tests of the flip inside EngineCore: its order, and what happens if the stage is wrong or the load fails.

vLLM is not installed here: EngineCore is a stand-in that notes what is done to it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock_rollout.engines.vllm.engine import VersionStamps
from support.vllm_stand_ins import imported_core

TIMINGS = [(0.5, 0.01), (0.6, 0.02)]


@dataclass
class Output:
    request_id: str
    new_token_ids: list[int]


@dataclass
class Message:
    outputs: list[Output]


class Core:
    """What the flip uses of EngineCore, with two workers."""

    def __init__(self, pause: Future[None] | None) -> None:
        self.done: list[Any] = []
        self.mismatches = ["", ""]
        self.commit_error: Exception | None = None
        self.pause = pause
        self.model_executor = SimpleNamespace(collective_rpc=self._rpc)
        self.scheduler = SimpleNamespace(begin_load=lambda salt: self.done.append(("begin", salt)))
        self.output_queue = SimpleNamespace(put_nowait=lambda item: self.done.append(("send", item[1].outputs)))
        self.input_queue = SimpleNamespace(put_nowait=lambda item: self.done.append(item[0]))

    def _rpc(self, method: str, timeout: float, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "penstock_mismatch":
            assert (timeout, args) == (60, (6, ["sum"]))
            return self.mismatches
        assert timeout == 600
        self.done.append(method)
        if self.commit_error:
            raise self.commit_error
        return TIMINGS

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None] | None:
        self.done.append(("pause", mode, clear_cache))
        return self.pause

    def resume_scheduler(self) -> None:
        self.done.append("resume")


PAUSE = ("pause", "keep", False)
LOADED = [
    "penstock_commit", ("send", [Output("penstock-version-6", [])]), ("begin", "6.1"), "resume", "wake",
]  # fmt: skip


class UniProcExecutor:
    """Stands in for vLLM's executor in EngineCore's process."""

    def _init_executor(self) -> None: ...


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that runs in EngineCore's process."""
    with imported_core(
        monkeypatch, EngineCoreOutput=Output, EngineCoreOutputs=Message,
        EngineCoreRequestType=SimpleNamespace(WAKEUP="wake"), UniProcExecutor=UniProcExecutor,
    ) as module:  # fmt: skip
        yield module


@pytest.fixture
def flip(worker: Any) -> Any:
    return lambda core: worker.flip(core, 6, ["sum"], "6.1", False)


def test_an_idle_engine_flips_at_once(flip: Any) -> None:
    core = Core(pause=None)
    mismatch, paused_s, timings = flip(core)
    assert (mismatch, timings) == ("", TIMINGS)
    assert paused_s >= 0
    assert core.done == [PAUSE, *LOADED]


def test_a_busy_engine_flips_when_no_step_is_in_flight(flip: Any) -> None:
    core = Core(pause=Future())
    flipped = flip(core)
    assert core.done == [PAUSE]
    assert not flipped.done()
    assert core.pause is not None
    core.pause.set_result(None)
    assert flipped.result(0)[2] == TIMINGS
    assert core.done == [PAUSE, *LOADED]


def test_a_stage_that_does_not_verify_pauses_nothing(flip: Any) -> None:
    core = Core(pause=None)
    core.mismatches = ["", "bucket 1 is corrupt"]
    assert flip(core) == ("bucket 1 is corrupt", 0.0, [])
    assert core.done == []


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_load_that_fails_fails_the_call_and_stays_paused(flip: Any, is_busy: bool) -> None:
    core = Core(pause=Future() if is_busy else None)
    core.commit_error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        flipped = flip(core)
        assert core.pause is not None
        core.pause.set_result(None)
        flipped.result(0)
    assert core.done == [PAUSE, "penstock_commit"]


def test_a_pause_that_fails_fails_the_call_and_loads_nothing(flip: Any) -> None:
    core = Core(pause=Future())
    flipped = flip(core)
    assert core.pause is not None
    core.pause.set_exception(RuntimeError("the cache was not cleared"))
    with pytest.raises(RuntimeError, match="was not cleared"):
        flipped.result(0)
    assert core.done == [PAUSE]


@pytest.mark.parametrize("is_disabled", [True, False])
def test_a_core_whose_server_has_imported_torch_compiles_nothing_on_a_cpu(
    worker: Any, is_disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """start.py sets the variable, too late for a process that is forked from one that has read it. vLLM compiles a
    comparison for the ranks of log-probs, which takes seconds in the first answer."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", str(int(is_disabled)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(worker, "prepare_process", lambda: None)
    with torch._dynamo.config.patch(disable=False):
        worker.InProcessExecutor()._init_executor()
        assert torch._dynamo.config.disable is is_disabled


def test_own_stamps_change_at_the_mark_even_if_no_one_has_read_the_answer() -> None:
    """Tokens of both versions arrive before the server gets to run."""
    resources = SimpleNamespace(output_queue_task=None)
    processor = SimpleNamespace(request_states={"internal": SimpleNamespace(external_req_id="a")})
    llm: Any = SimpleNamespace(engine_core=SimpleNamespace(resources=resources), output_processor=processor)
    stamps = VersionStamps(llm)
    stamps.policy_version = 5
    with stamps.of("a"):
        for output in (
            Output("internal", [1, 2]), Output("penstock-version-6", []), Output("internal", [3]),
            Output("of an aborted request", [4]),
        ):  # fmt: skip
            llm.engine_core.outputs_queue.put_nowait(Message([output]))
        segments = stamps.segments("a", SimpleNamespace(token_ids=[0, 0, 0]), 0)
    assert [(each.start, each.end, each.policy_version) for each in segments] == [(0, 2, 5), (2, 3, 6)]
