"""What `penstock up` says about a run that starts, and about one that goes wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.api.records import Finding, Notice, Part, Phase, QueueStat, Run, Server
from penstock.diagnosis import log_lines
from penstock.diagnosis.display import Display
from penstock.diagnosis.facts import NO_LEARNER
from penstock.diagnosis.log_lines import (
    NO_PROMPTS_AFTER_S,
    SLOW_AFTER_S,
    STILL_AFTER_S,
    Announcements,
    waiting_for,
)
from penstock.errors import Conflict
from penstock.store.reports import FIRST_BATCH, LAST_VALIDATION
from penstock_tools.local import processes
from penstock_tools.local.demo import check_not_paused
from penstock_tools.local.local_run import LocalRun
from penstock_tools.local.processes import Child, ProcessGroup
from penstock_tools.local.supervisor import News

QUEUE = QueueStat(**dict.fromkeys(QueueStat.model_fields, 0))
RUN = Run(
    run="test", step=0, policy_version=0, term=1, queue=QUEUE, metrics={}, servers=(), state="RUNNING",
    held_version=None, detail="",
)  # fmt: skip
FAILED = Notice(
    kind="reward_failed", text="the reward of sample 0 failed", detail="Traceback\n  line\nKeyError: 'x'", count=1,
    first_at_ms=1, last_at_ms=1,
)  # fmt: skip
SERVER = Server(
    server_id="s", address="a:1", state="READY", policy_version=0, heartbeat_age_ms=0, running_groups=0, engine="torch",
    weights_digest="", is_drained=False,
)  # fmt: skip


def run_with(**changes: Any) -> Run:
    return RUN.model_copy(update=changes)


def part(component: str, *phases: tuple[str, int]) -> Part:
    return Part(component=component, phases=tuple(Phase(name=name, entered_at_ms=at) for name, at in phases))


@pytest.mark.parametrize(("state", "detail", "message"), [
    ("PAUSED", "the reward failed", "its run has paused itself: the reward failed"),
    ("STOPPED", "", "its run was stopped by an operator"),
    ("PAUSED", "", ""), ("RUNNING", "", ""), ("STOPPED", NO_LEARNER, ""), ("WAITING", "no learner has started yet", ""),
])  # fmt: skip
def test_a_demo_ends_when_its_run_has_paused_itself(state: str, detail: str, message: str) -> None:
    status = run_with(state=state, detail=detail)
    if not message:
        check_not_paused(status)
        return
    with pytest.raises(Conflict, match=message):
        check_not_paused(status)


def test_the_first_failure_is_printed_once_with_its_traceback() -> None:
    announcements = Announcements(RUN)
    assert announcements.new_lines(run_with(notices=(FAILED,))) == [
        "the reward of sample 0 failed", "    Traceback", "      line", "    KeyError: 'x'",
    ]  # fmt: skip
    assert announcements.new_lines(run_with(notices=(FAILED.model_copy(update={"count": 624}),))) == []


def test_a_failure_of_an_earlier_start_is_printed_when_it_happens_again() -> None:
    announcements = Announcements(run_with(notices=(FAILED,)))
    assert announcements.new_lines(run_with(notices=(FAILED,))) == []
    assert announcements.new_lines(run_with(notices=(FAILED.model_copy(update={"count": 2}),)))[0] == FAILED.text


def test_a_rewind_and_its_end_are_printed_once() -> None:
    announcements, held = Announcements(RUN), run_with(held_version=3)
    begun, ended = held.rewind_text, "the rewind has ended: servers get the current version again, not 3"
    assert "holds the servers at version 3" in begun
    assert [announcements.new_lines(run) for run in (held, held, RUN, RUN)] == [[begun], [], [ended], []]


def test_a_pause_is_printed_with_its_reason_once() -> None:
    announcements, paused = (
        Announcements(RUN, "penstock runs resume --run-dir r"),
        run_with(state="PAUSED", detail="rewards fail"),
    )
    line = "the run is paused: rewards fail; `penstock runs resume --run-dir r` continues it"
    assert [announcements.new_lines(run) for run in (paused, paused, RUN, paused)] == [[line], [], [], [line]]
    starting = run_with(state="STOPPED", detail="no learner is alive")
    assert announcements.new_lines(starting) == [], "the learner of a run that continues is not up yet"
    by_operator = "the run is paused by an operator; `penstock runs resume --run-dir r` continues it"
    assert announcements.new_lines(run_with(state="STOPPED")) == [by_operator]


def test_a_server_that_leases_nothing_is_printed_once() -> None:
    announcements = Announcements(RUN)
    broken = run_with(servers=(SERVER.model_copy(update={"breaker_reason": "invalid_input", "breaker_failures": 8}),))
    assert [len(announcements.new_lines(run)) for run in (RUN, broken, broken)] == [0, 1, 0]


def test_each_phase_of_the_start_is_a_line_with_the_time_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(log_lines.time, "monotonic", lambda: clock[0])
    old = part("learner", ("training", 10))
    announcements = Announcements(run_with(parts=(old,)))
    assert announcements.new_lines(run_with(parts=(old,))) == []
    ray = part("learner", ("starting Ray", 1000))
    assert announcements.new_lines(run_with(parts=(ray,))) == ["learner: starting Ray"]
    loading = part("learner", ("starting Ray", 1000), ("placing", 5200), ("loading", 5300))
    assert announcements.new_lines(run_with(parts=(loading,))) == [
        "learner: placing (starting Ray: 4.2 s)", "learner: loading (placing: 0.1 s)",
    ]  # fmt: skip
    clock[0] += STILL_AFTER_S
    assert announcements.new_lines(run_with(parts=(loading,))) == ["learner: still loading"]
    assert announcements.new_lines(run_with(parts=(loading,))) == []
    clock[0] += STILL_AFTER_S
    paused = [announcements.new_lines(run_with(parts=(loading,), state="PAUSED")) for _ in range(2)]
    assert len(paused[0]) == 1 and paused[1] == [], "a paused run is printed once, and its phases are not repeated"
    ready = part("learner", *((phase.name, phase.entered_at_ms) for phase in loading.phases), ("training", 9300))
    assert announcements.new_lines(run_with(parts=(ready,))) == ["learner: training (loading: 4.0 s)"]
    clock[0] += STILL_AFTER_S
    assert announcements.new_lines(run_with(parts=(ready,))) == []


def test_a_run_that_is_stopped_while_it_starts_says_what_it_waited_for() -> None:
    loading, serving = part("learner", ("loading the model", 1)), part("rollout-0", ("serving", 1))
    assert waiting_for(run_with(parts=(loading, serving)), RUN) == "learner: loading the model"
    training = run_with(parts=(part("learner", ("training", 1)), serving))
    assert waiting_for(training, RUN) == ""
    assert waiting_for(training, training) == "its processes import their libraries", "that was an earlier start"
    validating = run_with(parts=(part("learner", ("training", 1), (LAST_VALIDATION, 2)), serving))
    assert waiting_for(validating, RUN) == "", "it has trained, so it gets the time that its last checkpoint needs"


def test_a_learner_without_prompts_says_so_once_and_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(log_lines.time, "monotonic", lambda: clock[0])
    announcements, ready = Announcements(RUN), part("learner", (FIRST_BATCH, 1000))
    lacking = Finding(code="prompts", level="WARN", text="no step yet: no prompt", advice="submit some")
    idle = run_with(parts=(ready,), speed_finding=lacking)
    assert announcements.new_lines(idle) == [f"learner: {FIRST_BATCH}"], (
        "a feed needs a moment to submit the first prompts"
    )
    clock[0] += NO_PROMPTS_AFTER_S
    assert [announcements.new_lines(idle) for _ in range(2)] == [["no step yet: no prompt; submit some"], []]
    clock[0] += max(STILL_AFTER_S, SLOW_AFTER_S)
    assert announcements.new_lines(idle) == []
    assert waiting_for(idle, RUN) == "no step yet: no prompt"
    few = idle.model_copy(update={"speed_finding": lacking.model_copy(update={"text": "3 of 8 groups"})})
    assert announcements.new_lines(few) == [], "more may follow at once"
    clock[0] += NO_PROMPTS_AFTER_S
    assert [announcements.new_lines(few) for _ in range(2)] == [["3 of 8 groups; submit some"], []]
    generating = lacking.model_copy(update={"code": "groups"})
    clock[0] += STILL_AFTER_S
    assert announcements.new_lines(run_with(parts=(ready,), speed_finding=generating)) == [
        f"learner: still {FIRST_BATCH}"
    ]


def test_a_learner_that_waits_for_the_first_validation_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, text = [0.0], "validating version 0 before the first step: 40/256 prompts"
    monkeypatch.setattr(log_lines.time, "monotonic", lambda: clock[0])
    validating = Finding(check="speed", level="OK", text=text, advice="", code="validation")
    run = run_with(parts=(part("learner", (FIRST_BATCH, 1)),), speed=text, speed_finding=validating)
    announcements = Announcements(RUN)
    announcements.new_lines(run)
    clock[0] += STILL_AFTER_S
    assert announcements.new_lines(run) == [f"learner: still {FIRST_BATCH}; {text}"]


def test_a_process_that_takes_long_to_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "QUIET_S", 0.01)
    group, lines = ProcessGroup(tmp_path), list[str]()
    for takes_long in (True, False):
        with subprocess.Popen(["sleep", "1000" if takes_long else "0"]) as process:

            def end(line: str, process: subprocess.Popen[bytes] = process) -> None:
                lines.append(line)
                process.kill()

            group.on_wait = end
            if not takes_long:
                process.wait()
            assert group._ends_in_time(Child("learner", process, tmp_path / "learner.log", stop_timeout_s=60))
    assert lines == [f"waiting for learner to end, at most 60 s (log: {tmp_path / 'learner.log'})"]


def test_a_paused_run_that_is_stopped_is_not_called_starting() -> None:
    lines: list[str] = []
    news = News(
        cast(LocalRun, SimpleNamespace(folder=Path("r"))), cast(Display, SimpleNamespace(print=lines.append)), RUN
    )
    loading = part("learner", (FIRST_BATCH, 1))
    for status in (run_with(parts=(loading,)), run_with(parts=(loading,), state="PAUSED", detail="rewards fail")):
        news.status = status
        news.print_stopping()
    assert lines == [
        f"stopping the run; it was still starting (learner: {FIRST_BATCH})",
        "stopping the run; it was paused at step 0",
    ]
