"""Rewards that give the same numbers as verl's built-in ones, for `rollout.reward.compat: verl`.

Each rule has verl's conventions, also where a better comparison exists: the format score of 0, DAPO's -1, and texts
that are compared after a fixed list of replacements. The tests compare each rule with a table of published results.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from penstock_rollout.rewards.rules import in_braces, search_qa
from penstock_rollout.rewards.rules import math as verified

TAIL_CHARS, STRICT_BOX_CHARS = 300, 100
"""Characters at the end of a response in which DAPO and GSM8K look for an answer, and DAPO for a box."""
NO_ANSWER = "[INVALID]"
"""The prediction of DAPO's rule for a response without an answer."""
GEOMETRY_FORMAT_SHARE = 0.1
_GSM8K = re.compile(r"#### (-?[0-9.,]+)")
_DAPO_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_GEOMETRY_FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)

# The normalisation of final answers of Minerva (Lewkowycz et al. 2022, appendix D), which DAPO uses.
_MINERVA_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_MINERVA_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_MINERVA_PATTERNS = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)
# The normalisation of the MATH dataset (Hendrycks et al. 2021), in its order.
_MATH_REPLACED = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip


def gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return 1 if the last number after `####` is the ground truth, without thousands separators; otherwise 0."""
    found = _GSM8K.findall(solution_str[-TAIL_CHARS:])
    return float(bool(found) and found[-1].replace(",", "") == ground_truth)


def math(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return 1 if the last box equals the ground truth as normalised text; otherwise 0."""
    answer = _boxed_text(solution_str)
    if answer is None:
        return 0.0
    try:
        return float(_plain_math(answer) == _plain_math(ground_truth))
    except ValueError:  # one of them cannot be normalised
        return float(answer == ground_truth)


def math_dapo(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Score 1 if the text after the last `Answer:` equals the ground truth after normalisation; otherwise -1. Without
    such a text, the last box near the end must equal the ground truth exactly."""
    tail = solution_str[-TAIL_CHARS:]
    found = _DAPO_ANSWER.findall(tail)
    prediction = _minerva(found[-1] if found else NO_ANSWER)
    is_right = prediction == _minerva(ground_truth)
    if prediction == NO_ANSWER:
        box = _last_closed_box(tail[-STRICT_BOX_CHARS:])
        if box is not None:
            prediction, is_right = box, box == ground_truth
    return {"score": 1.0 if is_right else -1.0, "acc": float(is_right), "pred": prediction}


def geometry3k(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return 0.9 for a right box plus 0.1 for a response of the form `<think>…</think>…\\boxed{…}`."""
    has_box = "\\boxed{" in solution_str
    is_right = has_box and verified(
        data_source, solution_str, ground_truth, extra_info, correct_score=1.0, wrong_score=0.0
    )
    has_format = _GEOMETRY_FORMAT.fullmatch(solution_str) is not None
    return (1 - GEOMETRY_FORMAT_SHARE) * is_right + GEOMETRY_FORMAT_SHARE * has_format


RULES: dict[str, Callable[..., Any]] = {
    "gsm8k": gsm8k, "math": math, "math_dapo": math_dapo, "geometry3k": geometry3k, "search_qa": search_qa,
}  # fmt: skip


def _minerva(answer: str) -> str:
    text = answer.rsplit("=", maxsplit=1)[-1]
    for before, after in _MINERVA_REPLACED:
        text = text.replace(before, after)
    for removed in _MINERVA_REMOVED:
        text = text.replace(removed, "")
    for pattern, replacement in _MINERVA_PATTERNS:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()


def _last_closed_box(text: str) -> str | None:
    """The content of the last `\\boxed{`, if its braces are closed."""
    start = text.rfind("\\boxed{")
    return None if start < 0 else in_braces(text, start + len("\\boxed"))


def _boxed_text(text: str) -> str | None:
    """The content of the last box, as the scorer of the MATH dataset finds it. `\\fbox` is not read."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].split("$")[0]
    start = text.rfind("\\boxed")
    is_braced = start >= 0 and text.startswith("\\boxed{", start)
    return in_braces(text, start + len("\\boxed")) if is_braced else None


def _plain_math(text: str) -> str:
    """Normalise an answer. Raises ValueError for LaTeX that ends too early, or that has units twice."""
    for before, after in _MATH_REPLACED:
        text = text.replace(before, after)
    if text.count("\\text{ ") > 1:
        raise ValueError("units appear twice")
    text = text.partition("\\text{ ")[0].replace("\\\\%", "").replace("\\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text.startswith("."):
        text = f"0{text}"
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        text = right
    text = _with_fractions(_with_roots(text).replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    quotient = re.fullmatch(r"(-?[0-9]+)/(-?[0-9]+)", text)
    if quotient and all(number == str(int(number)) for number in quotient.groups()):
        return "\\frac{{{}}}{{{}}}".format(*quotient.groups())
    return text


def _with_roots(text: str) -> str:
    """`\\sqrt3` with braces."""
    first, *others = text.split("\\sqrt")
    if not all(others):
        raise ValueError("a root of nothing")
    return first + "".join(f"\\sqrt{part}" if part[0] == "{" else f"\\sqrt{{{part[0]}}}{part[1:]}" for part in others)


def _with_fractions(text: str) -> str:
    """`\\frac12` and `\\frac1{72}` with braces. A text with a fraction of one character stays as it is."""
    first, *others = text.split("\\frac")
    if not all(others):
        raise ValueError("a fraction of nothing")
    if any(len(part) < 2 for part in others if part[0] != "{"):
        return text
    return first + "".join(f"\\frac{_with_braces(part)}" for part in others)


def _with_braces(part: str) -> str:
    if part[0] == "{":
        return part
    return f"{{{part[0]}}}{part[1:]}" if part[1] == "{" else f"{{{part[0]}}}{{{part[1]}}}{part[2:]}"
