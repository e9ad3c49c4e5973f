"""Prepare APPS for training (programs that read input and print) and MBPP for validation (functions with asserts).

python -m examples.recipes.code_tests.prepare --out data/code_tests
"""

import json
from collections.abc import Iterator, Sequence

from examples.recipes.sources import Row, Source, parse, row, write_rows

APPS, MBPP = "codeparrot/apps", "google-research-datasets/mbpp"
MAX_TESTS = 16
PROGRAM = "Write a Python program that solves this problem. It reads from standard input and prints the result."
FUNCTION = "Write a Python function that solves this problem. It has to pass these tests:"
FENCE = "Put the whole program into one block that starts with ```python."


def apps(source: Source) -> Iterator[Row]:
    """The problems of APPS that have tests. Their inputs and outputs stay outside the sandbox."""
    for index, entry in enumerate(source.rows(APPS, "train.jsonl")):
        tests = json.loads(entry["input_output"] or "{}")
        if not tests.get("inputs") or len(tests["inputs"]) != len(tests.get("outputs", ())):
            continue
        truth = {"inputs": tests["inputs"][:MAX_TESTS], "outputs": tests["outputs"][:MAX_TESTS]}
        start = ""
        if "fn_name" in tests:
            truth["fn_name"] = tests["fn_name"]
            start = f"\n\nDefine `{tests['fn_name']}`. Begin with:\n{entry['starter_code']}"
        asked = FENCE if start else f"{PROGRAM} {FENCE}"
        prompt = f"{asked}\n\n{entry['question']}{start}"
        yield row(prompt, "apps", json.dumps(truth), index=index, difficulty=entry["difficulty"])


def mbpp(source: Source) -> Iterator[Row]:
    for entry in source.rows(MBPP, "full/test-*.parquet"):
        tests = [*filter(None, [entry["test_setup_code"]]), *entry["test_list"]]
        prompt = f"{FUNCTION}\n" + "\n".join(entry["test_list"]) + f"\n\n{entry['text']}\n\n{FENCE}"
        yield row(prompt, "mbpp", json.dumps({"assert_case": tests}), index=entry["task_id"], difficulty="")


def main(argv: Sequence[str] | None = None) -> None:
    source, out = parse(__doc__, "data/code_tests", argv)
    write_rows(apps(source), out / "train.parquet")
    write_rows(mbpp(source), out / "mbpp.parquet")


if __name__ == "__main__":
    main()
