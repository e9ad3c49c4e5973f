"""`rollout.reward.compat: verl`: the numbers that verl 0.9's built-in rewards gave for these cases."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.config.rollout import RewardConfig
from penstock_rollout.rewards.function import build, read_score
from penstock_rollout.rewards.scorer import RewardChoice
from support.confinements import needs_sandbox

CASES = [
    ("openai/gsm8k", "so 70 + 2\n#### 72", "72", 1.0),
    ("openai/gsm8k", "#### 1,234", "1234", 1.0),
    ("openai/gsm8k", "#### 72.", "72", 0.0),
    ("openai/gsm8k", "#### $72", "72", 0.0),
    ("openai/gsm8k", "#### 71", "72", 0.0),
    ("openai/gsm8k", "the answer is 72", "72", 0.0),
    ("openai/gsm8k", "#### 1 #### 72", "72", 1.0),
    ("openai/gsm8k", "#### 72" + " " * 300, "72", 0.0),
    ("lighteval/MATH", "\\boxed{3} wait \\boxed{4}", "4", 1.0),
    ("lighteval/MATH", "\\boxed{\\dfrac12}", "\\frac{1}{2}", 1.0),
    ("lighteval/MATH", "\\boxed{0.5}", "\\frac{1}{2}", 1.0),
    ("lighteval/MATH", "\\boxed{1/2}", "\\frac{1}{2}", 1.0),
    ("lighteval/MATH", "\\fbox{4}", "4", 0.0),
    ("lighteval/MATH", "\\boxed 4$", "4", 1.0),
    ("lighteval/MATH", "\\boxed{x=4}", "4", 1.0),
    ("lighteval/MATH", "\\boxed{50\\%}", "50", 1.0),
    ("lighteval/MATH", "\\boxed{3\\text{ cm}}", "3", 1.0),
    ("lighteval/MATH", "\\boxed{2\\sqrt3}", "2\\sqrt{3}", 1.0),
    ("lighteval/MATH", "\\boxed{1+1}", "2", 0.0),
    ("lighteval/MATH", "it is 4", "4", 0.0),
    ("lighteval/MATH", "\\boxed{4", "4", 0.0),
    ("lighteval/MATH", "\\boxed{90^\\circ}", "90", 1.0),
    ("math_dapo", "Answer: 34", "34", 1.0),
    ("math_dapo", "Answer: \\boxed{34}", "34", 1.0),
    ("math_dapo", "answer : $1,000$", "1000", 1.0),
    ("math_dapo", "\\boxed{34}", "34", 1.0),
    ("math_dapo", "Answer: 3\nAnswer: 34", "34", 1.0),
    ("math_dapo", "Answer: 35 and \\boxed{34}", "34", -1.0),
    ("math_dapo", "it is 34", "34", -1.0),
    ("math_dapo", "Answer: x = 34 cm", "34", 1.0),
    ("math_dapo", "\\boxed{34}" + " " * 100, "34", -1.0),
    ("aime_2024", "Answer: 204.", "204", -1.0),
    ("math", "Answer: \\frac12", "\\frac{1}{2}", 1.0),
    ("math_dapo_reasoning", "Answer: 7", "7", 1.0),
    ("searchR1_nq", "<answer>The Beatles!</answer>", {"target": ["Beatles"]}, 1.0),
    ("searchR1_nq", "<answer>Stones</answer>", {"target": ["Beatles"]}, 0.0),
    ("searchR1_hotpotqa", "Beatles", {"target": ["Beatles"]}, 0.0),
    ("searchR1_nq", "<answer>x</answer><answer>beatles</answer>", {"target": "Beatles"}, 1.0),
    ("searchR1_nq", "<answer>beatles</answer>" * 11, {"target": ["Beatles"]}, 0.25),
    ("hiyouga/geometry3k", "<think>so</think> \\boxed{4}", "4", 1.0),
    ("hiyouga/geometry3k", "\\boxed{4}", "4", 0.9),
    ("hiyouga/geometry3k", "<think>so</think> \\boxed{3}", "4", 0.1),
    ("hiyouga/geometry3k", "it is 4", "4", 0.0),
]


DOUBLE = {"inputs": ["1\n", "5\n", "7\n"], "outputs": ["2\n", "10\n", "14\n"]}
TWELVE = {"inputs": ["1"] * 11 + ["2"], "outputs": ["1"] * 12}
"""Only the last test differs, and it is not among the first ten."""


def prints(text: str) -> dict[str, list[str]]:
    return {"inputs": ["x"], "outputs": [text]}


def calls(given: list[str], expected: list[str]) -> dict[str, Any]:
    return {"fn_name": "f", "inputs": given, "outputs": expected}


def block(program: str) -> str:
    return f"```python\n{program}\n```"


CODE_CASES = [
    (block("print(2 * int(input()))"), DOUBLE, 1.0),
    (block("print(10)"), DOUBLE, 1 / 3),
    (block("print(1)") + " or " + block("print(2 * int(input()))"), DOUBLE, 1.0),
    ("```\nprint(2 * int(input()))\n```", DOUBLE, 0.0),
    ("print(2 * int(input()))\n``` that was it", DOUBLE, 1.0),
    (block("print(input())") + "\n```\nprint(3)\n```", TWELVE, 1.0),
    (block("print(2 if input() == '2' else 0)"), TWELVE, 0.0),
    (block("syntax error("), DOUBLE, 0.0),
    (block("print(1.000001)"), prints("1.0"), 1.0),
    (block("print(1.001)"), prints("1.0"), 0.0),
    (block("print('1  2')"), prints("1 2"), 0.0),
    (block("print('1.0 2.0')"), prints("1.000001 2.0"), 0.0),
    (block("print(' a ')\nprint()\nprint('b')"), prints("a\nb"), 0.0),
    (block("print('a')\nprint()\nprint('b')"), prints("a\nb\n"), 1.0),
    (block("print('4')"), prints("4.0"), 1.0),
    (block("print('5')"), prints("4"), 0.0),
    (block("def f(a): return [a, a]"), calls(["1"], ["[[1, 1]]"]), 1.0),
    (block("class Solution:\n    def f(self, a): return a + 1"), calls(["1", "2"], ["2", "4"]), 0.0),
    (block("def f(a): return a + 1e-9"), calls(["1"], ["1"]), 0.0),
    (block("def f(a): return 1"), calls(["1"], ["true"]), 1.0),
]


def result(data_source: str, solution: str, ground_truth: Any) -> Any:
    choice = RewardChoice(RewardConfig(compat="verl"))
    settings = json.loads(choice.settings_json(choice.reward_for(data_source)))
    return build(settings)(data_source, solution, ground_truth, {})


@pytest.mark.parametrize(("data_source", "solution", "ground_truth", "expected"), CASES)
def test_the_number_is_verls(data_source: str, solution: str, ground_truth: Any, expected: float) -> None:
    assert read_score(result(data_source, solution, ground_truth))[0] == pytest.approx(expected, abs=1e-12)


def test_dapo_says_what_it_has_read() -> None:
    assert read_score(result("aime_2024", "Answer: $204$", "204")).answer == "204"
    assert read_score(result("aime_2024", "I give up", "204")).answer == "[INVALID]"
    assert read_score(0.5).answer is None and read_score({"score": 1, "pred": 3}).answer is None


@needs_sandbox
@pytest.mark.parametrize(("solution", "tests", "expected"), CODE_CASES)
def test_the_score_of_code_is_verls(solution: str, tests: dict[str, Any], expected: float) -> None:
    assert result("apps", solution, tests)["score"] == pytest.approx(expected, abs=1e-12)
