"""Rewards that apply a rule to the text. Pure functions with verl's arguments; settings are keyword arguments."""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Mapping
from typing import Any

TAIL_CHARS = 300
"""Number of characters at the end of a response that are searched. Answers come last, and long texts take long."""
_STRICT = re.compile(r"#### (-?\$?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[0-9][0-9.,]*|-?\.[0-9]+")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
MAX_TAGS = 10
"""A response with more opening or closing tags than this repeats itself to be right by chance."""
TAG_PENALTY = 4
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return 1 if the response equals the ground truth, ignoring surrounding white space."""
    return float(solution_str.strip() == str(ground_truth).strip())


def regex(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, pattern: str,
    ignore_case: bool,
) -> float:  # fmt: skip
    """Return 1 if group 1 of the last match equals the ground truth. A pattern without groups only has to match."""
    last = None
    for last in re.finditer(pattern, solution_str, re.IGNORECASE if ignore_case else 0):  # noqa: B007
        pass
    if last is None or not last.re.groups:
        return float(last is not None)
    found, wanted = (last.group(1) or "").strip(), str(ground_truth).strip()
    return float(found.lower() == wanted.lower() if ignore_case else found == wanted)


def gsm8k(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, method: str,
    correct_score: float, format_score: float,
) -> float:  # fmt: skip
    """Return `correct_score` for the right answer, `format_score` for a wrong one, and 0 for no answer. The ground
    truth is a number, or a solution of the dataset, whose number comes after `####`."""
    found = (_STRICT if method == "strict" else _FLEXIBLE).findall(solution_str[-TAIL_CHARS:])
    numbers = [plain for plain in map(_plain_number, found) if plain not in ("", "-")]
    if not numbers:
        return 0.0
    return correct_score if numbers[-1] == _plain_number(str(ground_truth).rpartition("####")[2]) else format_score


def _plain_number(text: str) -> str:
    """Without thousands separators, `$` or a final full stop."""
    return text.strip().replace(",", "").replace("$", "").rstrip(".")


def search_qa(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return 1 if the last answer equals one of the wanted answers, ignoring case, punctuation and articles. The ground
    truth is an answer, a list of answers, or a mapping whose `target` is one of these. A right answer among more than
    MAX_TAGS tags gets a quarter."""
    found = _ANSWER.findall(solution_str)
    if not found:
        return 0.0
    target = ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth
    wanted = [target] if isinstance(target, str) else target
    if plain_answer(found[-1]) not in {plain_answer(str(answer)) for answer in wanted}:
        return 0.0
    num_tags = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    return 1 / TAG_PENALTY if num_tags > MAX_TAGS else 1.0


def plain_answer(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def last_box(text: str) -> str | None:
    """The content of the last complete `\\boxed{…}` or `\\fbox{…}`, or of `\\boxed 5`; None if there is none. A box
    whose braces are not closed, as at the end of a truncated response, does not count."""
    for start in reversed(list(_BOX.finditer(text))):
        content = in_braces(text, start.end()) if text[start.end() : start.end() + 1] == "{" else _word(text, start)
        if content is not None:
            return content
    return None


def in_braces(text: str, start: int) -> str | None:
    """The text between the brace at `start` and the one that closes it."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 1 : place]
    return None


def _word(text: str, box: re.Match[str]) -> str | None:
    """The word after a box without braces, up to white space or the end of the formula."""
    if not box.group().endswith((" ", "\t")):
        return None
    word = re.match(r"[^\s$]+", text[box.end() :])
    return word.group() if word else None


def math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, correct_score: float,
    wrong_score: float,
) -> float:  # fmt: skip
    """Return `correct_score` if the answer equals the ground truth, else `wrong_score`. Equal expressions match,
    however they are written. The answer is in the last `\\boxed{}` or `\\fbox{}`. Without one, math-verify looks for it
    in the whole text."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # math-verify warns that its own timeout is off. The deadline of the reward process takes its place.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    wanted = str(ground_truth)
    gold = parse(_boxed(last_box(wanted) or wanted), extraction_config=[LatexExtractionConfig()], parsing_timeout=0)
    if not gold:
        raise ValueError(f"the ground truth {wanted!r} is not a mathematical expression")
    answer = last_box(solution_str)
    found = parse(
        solution_str if answer is None else _boxed(answer),
        extraction_config=[LatexExtractionConfig(), ExprExtractionConfig()],
        parsing_timeout=0,
    )
    return correct_score if verify(gold, found, timeout_seconds=0) else wrong_score


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"
