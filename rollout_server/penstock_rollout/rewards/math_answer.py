"""The math reward compares answers with math-verify. Equal expressions match, however they are written."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from penstock_rollout.rewards.boxes import last_box

# math-verify warns that its own timeout is off. The deadline of the reward process takes its place.
logging.getLogger("math_verify").setLevel(logging.ERROR)

NO_TIMEOUT = 0


def math(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    correct_score: float,
    wrong_score: float,
) -> float:
    """Return `correct_score` if the answer equals the ground truth, else `wrong_score`.

    The answer is in the last `\\boxed{}` or `\\fbox{}`. Without one, math-verify looks for it in the whole text."""
    wanted = str(ground_truth)
    gold = parse(
        _boxed(last_box(wanted) or wanted), extraction_config=[LatexExtractionConfig()], parsing_timeout=NO_TIMEOUT
    )
    if not gold:
        raise ValueError(f"the ground truth {wanted!r} is not a mathematical expression")
    answer = last_box(solution_str)
    found = parse(
        solution_str if answer is None else _boxed(answer),
        extraction_config=[LatexExtractionConfig(), ExprExtractionConfig()],
        parsing_timeout=NO_TIMEOUT,
    )
    return correct_score if verify(gold, found, timeout_seconds=NO_TIMEOUT) else wrong_score


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"
