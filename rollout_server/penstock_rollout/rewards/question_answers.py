"""The reward of questions with short answers, as in search agents: the text in the last `<answer>` tag must match."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

MAX_TAGS = 10
"""A response with more opening or closing tags than this repeats itself to be right by chance."""
TAG_PENALTY = 4
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def search_qa(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return 1 if the last answer equals one of the wanted answers, ignoring case, punctuation and articles.

    The ground truth is an answer, a list of answers, or a mapping whose `target` is one of these. A right answer among
    more than MAX_TAGS tags gets a quarter."""
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
