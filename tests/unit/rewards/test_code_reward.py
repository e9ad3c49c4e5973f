"""The code reward: every shape of ground truth, how outputs are compared, and programs that try to cheat."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.rollout import CodeReward, RewardConfig
from penstock.errors import ConfigError
from penstock_rollout.rewards import code
from penstock_rollout.rewards.code import extract_program, read_cases, same_text, same_value
from penstock_rollout.rewards.function import build
from penstock_rollout.rewards.sandbox import run as sandbox_run
from penstock_rollout.rewards.sandbox.builtin import Builtin, Layers
from penstock_rollout.rewards.sandbox.program import Outcome
from penstock_rollout.rewards.sandbox.run import Sandbox
from penstock_rollout.rewards.scorer import RewardChoice
from support.confinements import needs_sandbox

DOUBLE = {"inputs": ["1\n", "5\n", "7\n"], "outputs": ["2\n", "10\n", "14\n"]}


def score(program: str, ground_truth: Any, **changes: Any) -> dict[str, float]:
    reward = CodeReward(**({"test_timeout_s": 60.0, "timeout_s": 240.0} | changes))
    settings = json.loads(RewardChoice(RewardConfig()).settings_json(reward))
    result: dict[str, float] = build(settings)("code", program, ground_truth, {})
    return result


@needs_sandbox
@pytest.mark.parametrize("as_text", [False, True])
def test_programs_that_print(as_text: bool) -> None:
    truth = json.dumps(DOUBLE) if as_text else DOUBLE
    assert score("Like so:\n```python\nprint(2 * int(input()))\n```\nDone.", truth) == {
        "score": 1.0, "tests_passed": 3, "tests_total": 3,
    }  # fmt: skip
    assert score("```python\nprint(10)\n```", truth)["score"] == pytest.approx(1 / 3)
    assert score("```python\nprint(10)\n```", truth, partial_credit=False)["score"] == 0
    assert score("```python\nprint(2)\n```", truth, max_tests=1)["score"] == 1
    assert score("no program at all", truth)["score"] == 0
    assert score("", truth)["score"] == 0


@needs_sandbox
def test_calls_of_functions_and_methods() -> None:
    truth = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}
    assert score("def add(a, b):\n    print('noise')\n    return a + b", truth)["score"] == 1
    assert score("class Solution:\n    def add(self, a, b):\n        return a + b", truth)["score"] == 1
    assert score("def add(a, b): return 3", truth)["score"] == 0.5
    assert score("def sub(a, b): return 3", truth)["score"] == 0
    # LiveCodeBench: arguments as lines of JSON; APPS: the value in a list.
    lines = {"fn_name": "f", "inputs": ['[1, 2]\n"x"'], "outputs": ['[1, 2, "x"]']}
    assert score("def f(a, b): return a + [b]", lines)["score"] == 1
    assert score("def f(a): return (a, a)", {"fn_name": "f", "inputs": [[1]], "outputs": [[[1, 1]]]})["score"] == 1


@needs_sandbox
@pytest.mark.parametrize(
    ("truth", "share"),
    [
        ({"assert_case": ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 0"]}, 2 / 3),
        (["assert f(1) == 1", "assert f(3) == 0"], 0.5),
        ({"functional": "def test():\n    assert f(3) == 9\ntest()"}, 1),
        ("assert f(2) == 4\nassert f(3) == 9", 1),
        ("assert f(2) == 5", 0),
    ],
)
def test_asserts(truth: Any, share: float) -> None:
    assert score("def f(x): return x * x", truth)["score"] == pytest.approx(share)


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)\ndef f(x): return 1",
        "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): return 0",
        "while True: pass",
        "print('ok')",
        "def f(x): raise KeyboardInterrupt",
        "def f(x) syntax error",
    ],
)
def test_a_program_does_not_pass_by_ending_early(program: str) -> None:
    assert score(program, ["assert f(1) == 1"], test_timeout_s=1.0)["score"] == 0


@needs_sandbox
def test_the_deadline_of_the_reward_leaves_the_rest_of_the_tests_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is the test's: only a test that runs into its limit takes time."""
    now, limits_s, run = [0.0], list[float](), Sandbox.run

    def run_on_the_clock(self: Sandbox, *words: Any, wall_s: float, **options: Any) -> Outcome:
        limits_s.append(wall_s)
        outcome = run(self, *words, wall_s=60.0 if len(limits_s) == 1 else 0.2, **options)
        now[0] += wall_s if outcome.ended == "deadline" else 0.0
        return outcome

    monkeypatch.setattr(Sandbox, "run", run_on_the_clock)
    monkeypatch.setattr(code, "time", SimpleNamespace(monotonic=lambda: now[0]))
    truth = {"inputs": ["0"] + ["1"] * 50, "outputs": ["0"] + ["1"] * 50}
    program = "n = int(input())\nwhile n: pass\nprint(n)"
    result = score(program, truth, test_timeout_s=1.0, timeout_s=4.0)
    assert result["tests_passed"] == 1 and result["tests_total"] == 51
    assert limits_s == [1.0, 1.0, 1.0], "of 4 s, 2 are left for the answer"


def test_without_isolation_code_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    bare = Layers(0, has_seccomp=False, has_namespaces=False, drops_user=False)
    monkeypatch.setattr(sandbox_run, "_find", lambda choice: Sandbox(Builtin(bare), None))
    with pytest.raises(ConfigError, match="cannot isolate"):
        score("print(2)", DOUBLE)
    assert score("print(2 * int(input()))", DOUBLE, allow_unisolated=True)["score"] == 1


@pytest.mark.parametrize("truth", [None, 7, {}, [], {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}])
def test_a_ground_truth_without_tests_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        read_cases(truth)


def test_the_program_is_the_last_block() -> None:
    assert extract_program("```python\na\n```\nor\n```py\nb\n```") == "b"
    assert extract_program("```\na\n```") == "a"
    assert extract_program("```python\nunfinished") == "unfinished"
    assert extract_program("print(1)") == "print(1)"


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1  2 \n3", True),
        ("0.5000001", "0.5", True),
        ("0.51", "0.5", False),
        ("1000000000000001", "1000000000000002", False),  # integers are exact
        ("1\n2", "1 2", False),
        ("Yes", "YES", False),
        ("1e3", "1000.0", True),
        ("", "1", False),
    ],
)
def test_printed_answers(printed: str, expected: str, same: bool) -> None:
    assert same_text(printed, expected) is same


def test_returned_answers() -> None:
    assert same_value([1, 2.0000000001], [1, 2.0])
    assert same_value(1, 1.0) and not same_value(True, 1) and not same_value("1", 1)
    assert not same_value([1], [1, 2]) and not same_value({"a": 1}, {"a": 2}) and same_value({"a": [1]}, {"a": [1]})


def test_bubblewrap_must_be_installed_unless_another_confinement_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match="bubblewrap is not installed; install it"):
        Sandbox.open("auto")
