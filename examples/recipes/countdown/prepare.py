"""Prepare Countdown: reach a target from three or four numbers.

python -m examples.recipes.countdown.prepare --out data/countdown

The dataset has 490,364 problems. The first 512 are held out, and the next 20,000 are for training.
"""

import itertools
import json
from collections.abc import Iterator, Sequence

from examples.recipes.sources import Row, Source, parse, row, write_rows

DATASET = "Jiayi-Pan/Countdown-Tasks-3to4"
NUM_HELD_OUT = 512
NUM_TRAIN = 20_000
QUESTION = (
    "Combine the numbers {numbers} to reach {target}. Use each number exactly once, with +, -, *, / and brackets. "
    "Think first, then write the expression alone in <answer> </answer>, for example <answer>(1 + 2) * 3</answer>."
)


def problems(source: Source) -> Iterator[Row]:
    for index, entry in enumerate(source.rows(DATASET, "data/*.parquet")):
        numbers, target = [int(number) for number in entry["nums"]], int(entry["target"])
        question = QUESTION.format(numbers=", ".join(map(str, numbers)), target=target)
        truth = json.dumps({"numbers": numbers, "target": target})
        yield row(question, "countdown", truth, index=index)


def main(argv: Sequence[str] | None = None) -> None:
    source, out = parse(__doc__, "data/countdown", argv)
    entries = list(itertools.islice(problems(source), NUM_HELD_OUT + NUM_TRAIN))
    num_held_out = min(NUM_HELD_OUT, len(entries) // 4)
    write_rows(entries[:num_held_out], out / "test.parquet")
    write_rows(entries[num_held_out:], out / "train.parquet")


if __name__ == "__main__":
    main()
