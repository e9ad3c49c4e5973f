"""Rewards that apply a rule to the text. Pure functions with verl's arguments; settings are keyword arguments."""

from __future__ import annotations

import re
from typing import Any

TAIL_CHARS = 300
"""Number of characters at the end of a response that are searched. Answers come last, and long texts take long."""
_STRICT = re.compile(r"#### (-?\$?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[0-9][0-9.,]*|-?\.[0-9]+")


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return 1 if the response equals the ground truth, ignoring surrounding white space."""
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
    """Return 1 if group 1 of the last match equals the ground truth. A pattern without groups only has to match."""
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
    """Return `correct_score` for the right answer, `format_score` for a wrong one, and 0 for no answer.

    The ground truth is a number, or a solution of the dataset, whose number comes after `####`."""
    answer = gsm8k_answer(solution_str, method)
    if answer is None:
        return 0.0
    return correct_score if answer == _plain_number(str(ground_truth).rpartition("####")[2]) else format_score


def gsm8k_answer(solution_str: str, method: str) -> str | None:
    """The last answer, without thousands separators, `$` or a final full stop. None if there is no answer."""
    found = (_STRICT if method == "strict" else _FLEXIBLE).findall(solution_str[-TAIL_CHARS:])
    numbers = [plain for plain in map(_plain_number, found) if plain not in ("", "-")]
    return numbers[-1] if numbers else None


def _plain_number(text: str) -> str:
    return text.strip().replace(",", "").replace("$", "").rstrip(".")
