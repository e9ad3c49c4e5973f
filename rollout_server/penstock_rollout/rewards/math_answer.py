"""Mathematical answers, compared by math-verify: equal expressions are right however they are written."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# It warns that its own alarm is off. The deadline of the process that runs this is the one that counts.
logging.getLogger("math_verify").setLevel(logging.ERROR)

NO_ALARM = 0


def math(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    correct_score: float,
    wrong_score: float,
) -> float:
    """`correct_score` when the response's answer, the last box where there is one, equals the ground truth."""
    wanted = str(ground_truth)
    boxed = wanted if "\\boxed" in wanted else f"\\boxed{{{wanted}}}"
    gold = parse(boxed, extraction_config=[LatexExtractionConfig()], parsing_timeout=NO_ALARM)
    if not gold:
        raise ValueError(f"the ground truth {wanted!r} is no mathematical expression")
    found = parse(
        solution_str,
        extraction_config=[LatexExtractionConfig(), ExprExtractionConfig()],
        parsing_timeout=NO_ALARM,
    )
    return correct_score if verify(gold, found, timeout_seconds=NO_ALARM) else wrong_score
