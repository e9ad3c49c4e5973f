"""Tiny copies of the datasets: a few rows in the format and the files that the Hub has."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Files = dict[str, list[dict[str, Any]]]
NUM_ROWS = 24
NUM_HELD_OUT = 4


def write_tiny_copies(recipe: str, folder: Path) -> None:
    """Write the datasets of a recipe, as `prepare.py --from FOLDER` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in COPIES[recipe]().items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _gsm8k() -> Files:
    def rows(first: int, count: int) -> list[dict[str, Any]]:
        return [
            {"question": f"Ann has {n} pens and buys 2. How many now?", "answer": f"{n} + 2 = {n + 2}\n#### {n + 2}"}
            for n in range(first, first + count)
        ]

    folder = "gsm8k/main"
    return {
        f"{folder}/train-00000-of-00001.parquet": rows(1, NUM_ROWS),
        f"{folder}/test-00000-of-00001.parquet": rows(100, NUM_HELD_OUT),
    }


def _math() -> Files:
    def rows(first: int, count: int) -> list[dict[str, Any]]:
        return [
            {
                "data_source": "math_dapo",
                "prompt": [{"role": "user", "content": f"What is {n} + 2? Last line: Answer: $Answer"}],
                "reward_model": {"ground_truth": str(n + 2), "style": "rule"},
                "extra_info": {"index": str(n)},
            }
            for n in range(first, first + count)
        ]

    train = rows(1, NUM_ROWS)
    return {
        "DAPO-Math-17k/data/dapo-math-17k.parquet": train + train,
        "AIME-2024/data/aime-2024.parquet": 2 * rows(100, NUM_HELD_OUT),
    }


def _countdown() -> Files:
    rows = [{"target": n + 7, "nums": [n, 3, 4]} for n in range(1, NUM_ROWS + NUM_HELD_OUT + 1)]
    return {"Countdown-Tasks-3to4/data/train-00000-of-00001.parquet": rows}


def _search() -> Files:
    def rows(first: int, count: int) -> list[dict[str, Any]]:
        return [
            {"question": f"What is the capital of country {n}?", "golden_answers": [f"City {n}"], "data_source": "nq"}
            for n in range(first, first + count)
        ]

    passages = [
        {"id": str(n), "contents": f'"Country {n}"\nThe capital of country {n} is City {n}.'}
        for n in range(1, NUM_ROWS + NUM_HELD_OUT + 1)
    ]
    return {
        "nq_hotpotqa_train/train.parquet": rows(1, NUM_ROWS),
        "nq_hotpotqa_train/test.parquet": rows(NUM_ROWS + 1, NUM_HELD_OUT),
        "wiki.jsonl": passages,
    }


def _code() -> Files:
    def program(n: int) -> dict[str, Any]:
        tests = {"inputs": ["1\n", "5\n"], "outputs": [f"{1 + n}\n", f"{5 + n}\n"]}
        return {
            "problem_id": n, "question": f"Read a number and print it plus {n}.", "input_output": json.dumps(tests),
            "difficulty": "introductory", "starter_code": "",
        }  # fmt: skip

    def function(n: int) -> dict[str, Any]:
        return {
            "task_id": n, "text": f"Write a function f that adds {n}.", "test_setup_code": "",
            "test_list": [f"assert f(1) == {n + 1}", f"assert f(5) == {n + 5}"],
        }  # fmt: skip

    untested = program(0) | {"input_output": ""}
    return {
        "apps/train.jsonl": [untested, *map(program, range(1, NUM_ROWS + 1))],
        "mbpp/full/test-00000-of-00001.parquet": [function(n) for n in range(1, NUM_HELD_OUT + 1)],
    }


COPIES: dict[str, Callable[[], Files]] = {
    "gsm8k": _gsm8k,
    "lora_one_gpu": _gsm8k,
    "math_dapo": _math,
    "retool": _math,
    "countdown": _countdown,
    "search_r1": _search,
    "code_tests": _code,
    "smollm2": lambda: {},  # its problems are made by prepare.py
}
"""The datasets of each recipe: files by their path, relative to the folder of the copies."""
