"""Rewards that apply a rule: exact match, regular expressions, GSM8K's format, and math-verify's comparison."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.rollout import Gsm8kReward, MathReward, RegexReward, Reward, RewardConfig
from penstock.errors import ConfigError
from penstock_rollout.rewards.function import WrongScore, build, read_score
from penstock_rollout.rewards.scorer import RewardChoice


def score(reward: Reward, solution: str, ground_truth: Any) -> float:
    settings = json.loads(RewardChoice(RewardConfig()).settings_json(reward))
    return read_score(build(settings)("source", solution, ground_truth, {}))[0]


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("3 + 4 = 7, so\n#### 72", 1.0),
        ("#### 1\nno, wait\n#### 72", 1.0),  # the last one counts
        ("#### 72\n#### 1", 0.1),
        ("#### $72", 1.0),
        ("#### 72.", 1.0),
        ("#### 70", 0.1),
        ("The answer is 72", 0.0),  # lacks ####
        ("####72", 0.0),
        ("#### -", 0.0),
        ("", 0.0),
        ("#### 72" + " " * 300, 0.0),  # only the end is searched, as verl does
    ],
)
def test_gsm8k_strict(solution: str, expected: float) -> None:
    assert score(Gsm8kReward(), solution, "72") == expected


def test_gsm8k_ignores_thousands_separators_on_both_sides() -> None:
    assert score(Gsm8kReward(), "#### 1,234", "1234") == 1.0
    assert score(Gsm8kReward(), "#### 1234", "1,234") == 1.0
    assert score(Gsm8kReward(), "#### -1,234", "-1234") == 1.0


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("3 + 4 = 7, so 72 apples.", 1.0),
        ("It costs $72.", 1.0),
        ("first 72, then 5", 0.1),
        ("none at all...", 0.0),
    ],
)
def test_gsm8k_flexible_takes_the_last_number(solution: str, expected: float) -> None:
    assert score(Gsm8kReward(method="flexible"), solution, "72") == expected


def test_gsm8k_takes_the_number_of_a_solution_of_the_dataset() -> None:
    assert score(Gsm8kReward(), "#### 1234", "She sold 1,200 and 34 clips.\n#### 1,234") == 1.0


def test_gsm8k_scores_are_configurable() -> None:
    reward = Gsm8kReward(format_score=0.0, correct_score=2.0)
    assert [score(reward, text, "7") for text in ("#### 7", "#### 8", "7")] == [2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("pattern", "solution", "truth", "expected"),
    [
        (r"<answer>(.*?)</answer>", "<answer>A</answer> or <answer> B </answer>", "B", 1.0),
        (r"<answer>(.*?)</answer>", "<answer>B</answer> or <answer>A</answer>", "B", 0.0),
        (r"<answer>(.*?)</answer>", "B", "B", 0.0),
        (r"^yes\b", "yes, certainly", None, 1.0),
        (r"^yes\b", "no", None, 0.0),
        (r"answer: (\d+)", "answer: 7", 7, 1.0),
    ],
)
def test_regex(pattern: str, solution: str, truth: Any, expected: float) -> None:
    assert score(RegexReward(kind="regex", pattern=pattern), solution, truth) == expected


def test_regex_can_ignore_case() -> None:
    reward = RegexReward(kind="regex", pattern=r"answer: (\w+)", ignore_case=True)
    assert score(reward, "ANSWER: paris", "Paris") == 1.0


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        (r"so $x = \boxed{\frac{1}{2}}$", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\dfrac{2}{4}}", r"\frac12", 1.0),
        (r"\boxed{1/3}", r"\frac{1}{2}", 0.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"The final answer is $10\sqrt{3}$.", r"10\sqrt{3}", 1.0),
        (r"Answer: \boxed{204}", 204, 1.0),  # AIME's integers
        (r"\boxed{113}", "204", 0.0),
        (r"\boxed{3} wait \boxed{4}", "4", 1.0),  # the last box counts
        (r"\boxed{3} wait \boxed{4}", "3", 0.0),
        (r"\fbox{4}", "4", 1.0),
        (r"\boxed{3} \fbox{4}", "4", 1.0),
        (r"so $\boxed 5$", "5", 1.0),
        (r"\boxed{\frac{1}{2}} and then \boxed{", r"\frac12", 1.0),  # a box that was cut off does not count
        (r"\boxed{4}, which is 2+2", "4", 1.0),
        ("I do not know.", "204", 0.0),
    ],
)
def test_math_compares_expressions(solution: str, truth: Any, expected: float) -> None:
    assert score(MathReward(), solution, truth) == expected


def test_math_has_a_score_for_wrong_answers() -> None:
    assert score(MathReward(wrong_score=-1.0), r"\boxed{2}", "3") == -1.0


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (1, (1.0, {})),
        (True, (1.0, {})),
        ({"score": 0.5, "acc": True, "pred": "7", "nan": float("nan")}, (0.5, {"score": 0.5, "acc": 1.0})),
        ((0.25, {"note": "metadata"}), (0.25, {})),
        ([1.0], (1.0, {})),
        ({"score": -1e15, "huge": 1e300}, (-1e15, {"score": -1e15})),
    ],
)
def test_return_values_that_are_rewards(returned: Any, expected: Any) -> None:
    assert read_score(returned)[:2] == expected


def test_parts_may_be_scalars_of_numpy_and_torch() -> None:
    returned = {"score": np.float32(1), "acc": np.bool_(True), "short": torch.tensor(0.5), "all": np.ones(2)}
    assert read_score(returned)[:2] == (1.0, {"score": 1.0, "acc": 1.0, "short": 0.5})


@pytest.mark.parametrize(
    "returned",
    [
        float("nan"), float("inf"), 1e300, -1e300, 1e39, 10**400, {"score": 1e300}, [-1e300], None, "1", {"acc": 1}, {},
        [], {"score": None},
    ],
)  # fmt: skip
def test_return_values_that_are_not_rewards_are_refused(returned: Any) -> None:
    with pytest.raises(WrongScore, match="returned"):
        read_score(returned)


@pytest.mark.parametrize(("returned", "said"), [
    (None, "returned None, not a number; it may lack a `return`"), ("0.5", "returned the text '0.5', not a number"),
    ({"score": None}, "returned None"), (object(), "returned a object, not a number"),
])  # fmt: skip
def test_what_was_returned_is_named(returned: Any, said: str) -> None:
    with pytest.raises(WrongScore, match=re.escape(said)):
        read_score(returned)


# ── which reward a data source gets ──


@pytest.mark.parametrize(
    ("data_source", "kind"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("aime_2024", "math"),
        ("math_dapo", "math"),
        ("codecontests", "code"),
        ("hiyouga/geometry3k", "math"),
        ("searchR1_nq", "search_qa"),
        ("lighteval/MATH", "math"),
        ("somebody/else", "exact_match"),
        ("", "exact_match"),
    ],
)
def test_the_built_in_table(data_source: str, kind: str) -> None:
    assert RewardChoice(RewardConfig()).reward_for(data_source).kind == kind


def test_the_order_of_choice() -> None:
    config = RewardConfig.model_validate(
        {
            "by_data_source": {
                "mine/*": {"kind": "gsm8k"},
                "mine/special": {"kind": "math"},
                "gsm8k": {"kind": "regex", "pattern": "x"},
            },
            "default": {"kind": "regex", "pattern": "y"},
        }
    )
    choice = RewardChoice(config)
    kinds = [choice.reward_for(name).kind for name in ("mine/a", "mine/special", "gsm8k", "openai/gsm8k", "unknown")]
    assert kinds == ["gsm8k", "math", "regex", "gsm8k", "regex"]
    with_function = RewardChoice(config.model_copy(update={"function_file": "reward.py"}))
    assert [with_function.reward_for(name).kind for name in ("mine/a", "openai/gsm8k")] == ["gsm8k", "function"]


def test_an_unknown_data_source_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    choice = RewardChoice(RewardConfig())
    for _ in range(3):
        choice.reward_for("somebody/else")
    assert [record.message.split(";")[0] for record in caplog.records] == ["unknown data source 'somebody/else'"]


def test_a_function_file_must_exist_and_have_the_function(tmp_path: Any) -> None:
    path = tmp_path / "reward.py"
    settings = {
        "kind": "function",
        "file": str(path),
        "name": "compute_score",
        "kwargs": {},
        "batch": False,
        "timeout_s": 1.0,
    }
    for content, message in ((None, "there is no file"), ("1/0", "ZeroDivisionError"), ("x = 1", "no .compute_score")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            build(settings)
