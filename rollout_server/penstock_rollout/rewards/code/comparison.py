"""Compares the printed or returned output of a program with the expected one. Fractions may differ by rounding."""

from __future__ import annotations

import math
from typing import Any

_RELATIVE_TOLERANCE, _ABSOLUTE_TOLERANCE = 1e-6, 1e-9


def same_text(printed: str, expected: str) -> bool:
    """Compare line by line and word by word. Integers must be equal; numbers with a fraction may differ by rounding."""
    lines, wanted = [[line.split() for line in text.strip().splitlines()] for text in (printed, expected)]
    return len(lines) == len(wanted) and all(
        len(words) == len(others) and all(map(_same_word, words, others))
        for words, others in zip(lines, wanted, strict=True)
    )


def same_value(returned: Any, expected: Any) -> bool:
    """Compare JSON values. Tuples compare as lists, because JSON turns them into lists."""
    if isinstance(returned, float) or isinstance(expected, float):
        numbers = isinstance(returned, int | float) and isinstance(expected, int | float)
        return numbers and math.isclose(returned, expected, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(map(same_value, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(same_value(returned[key], expected[key]) for key in returned)
    return type(returned) is type(expected) and bool(returned == expected)


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if "." not in word + expected and "e" not in (word + expected).lower():
        return False
    try:
        return math.isclose(float(word), float(expected), rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    except ValueError:
        return False
