"""Scores one answer to an addition. The signature is that of verl's `compute_score`, so it works in both systems."""

import re

TRAILING_SPECIAL_TOKENS = re.compile(r"(?:<eos>|<pad>|\s)+$")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1.0 if the answer is exactly the ground truth, else 0.0.

    Special tokens and white space at the end are ignored; nothing else is. There is no credit for an answer that is
    close, for a right prefix, or for a right number followed by anything more.
    """
    return float(TRAILING_SPECIAL_TOKENS.sub("", solution_str) == ground_truth)
