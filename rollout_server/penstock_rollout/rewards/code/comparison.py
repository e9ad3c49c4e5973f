"""Compares the printed or returned output of a program with the expected one. Fractions may differ by rounding."""

from __future__ import annotations

import math
from typing import Any

_RELATIVE_TOLERANCE, _ABSOLUTE_TOLERANCE = 1e-6, 1e-9
_VERL_RELATIVE, _VERL_ABSOLUTE = 1e-5, 1e-8


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


def verl_same_text(printed: str, expected: str) -> bool:
    """Compare as verl does: the texts without surrounding white space, then the lines without empty ones. Numbers may
    differ by rounding if every line is one number."""
    lines = printed.splitlines()
    if expected.strip() in ("\n".join(lines).strip(), "\n".join(line.strip() for line in lines).strip()):
        return True
    filled, wanted = [line for line in lines if line], [line.strip() for line in expected.split("\n") if line]
    if wanted in (lines, filled):
        return True
    if len(filled) != len(wanted) or all(word.isdigit() for word in (*filled, *wanted)):
        return False
    try:
        numbers = [(float(line), float(other)) for line, other in zip(filled, wanted, strict=True)]
    except ValueError:
        return False
    return all(abs(given - right) <= _VERL_ABSOLUTE + _VERL_RELATIVE * abs(right) for given, right in numbers)


def verl_same_value(returned: Any, expected: Any) -> bool:
    """Compare JSON values as verl does: exactly, also with the first entry of an expected list."""
    is_first = isinstance(expected, list) and bool(expected) and returned == expected[0]
    return bool(returned == expected) or is_first


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if "." not in word + expected and "e" not in (word + expected).lower():
        return False
    try:
        return math.isclose(float(word), float(expected), rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    except ValueError:
        return False
