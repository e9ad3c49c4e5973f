"""Rewards by a rule on the text. Pure functions with verl's arguments, and settings by keyword."""

from __future__ import annotations

import re
from typing import Any

TAIL_CHARS = 300
"""Answers stand at the end; searching a long response for numbers is slow."""
_STRICT = re.compile(r"#### (-?\$?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[0-9][0-9.,]*|-?\.[0-9]+")


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 when the response is the ground truth, white space aside."""
    return float(solution_str.strip() == str(ground_truth).strip())


def regex(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    pattern: str,
    ignore_case: bool,
) -> float:
    """1 when the last match's group 1 is the ground truth; for a pattern without groups, when there is a match."""
    last = None
    for last in re.finditer(pattern, solution_str, re.IGNORECASE if ignore_case else 0):  # noqa: B007
        pass
    if last is None or not last.re.groups:
        return float(last is not None)
    found, wanted = (last.group(1) or "").strip(), str(ground_truth).strip()
    return float(found.lower() == wanted.lower() if ignore_case else found == wanted)


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    method: str,
    correct_score: float,
    format_score: float,
) -> float:
    """`correct_score`, `format_score` for a well-formed wrong answer, 0 for none."""
    answer = gsm8k_answer(solution_str, method)
    if answer is None:
        return 0.0
    return correct_score if answer == _plain_number(str(ground_truth)) else format_score


def gsm8k_answer(solution_str: str, method: str) -> str | None:
    """The last answer, without thousands separators, currency and the full stop of its sentence."""
    found = (_STRICT if method == "strict" else _FLEXIBLE).findall(solution_str[-TAIL_CHARS:])
    numbers = [plain for plain in map(_plain_number, found) if plain not in ("", "-")]
    return numbers[-1] if numbers else None


def _plain_number(text: str) -> str:
    return text.strip().replace(",", "").replace("$", "").rstrip(".")
