"""Prepare sums and word problems, made here: 8192 training and 256 held-out problems of five kinds.

python -m examples.recipes.smollm2.prepare --out data/smollm2
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from examples.recipes.sources import Row, parse, row, unique, write_rows

NUM_HELD_OUT = 256
NUM_TRAIN = 8192
SOURCE = "openai/gsm8k"
"""The built-in reward of GSM8K scores the number after ####."""
INSTRUCTION = "Think briefly, then give the answer after ####."
NAMES = ("Ann", "Ben", "Carla", "Dev", "Elif", "Femi")
THINGS = ("pens", "apples", "coins", "books", "stamps", "shells")


def _sum(rng: random.Random) -> tuple[str, int]:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return f"What is {a} + {b}?", a + b


def _difference(rng: random.Random) -> tuple[str, int]:
    b, a = sorted((rng.randint(10, 99), rng.randint(10, 99)))
    return f"What is {a} - {b}?", a - b


def _product(rng: random.Random) -> tuple[str, int]:
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return f"What is {a} times {b}?", a * b


def _purchase(rng: random.Random) -> tuple[str, int]:
    a, b, thing = rng.randint(5, 60), rng.randint(5, 60), rng.choice(THINGS)
    return f"{rng.choice(NAMES)} has {a} {thing} and buys {b} more. How many {thing} are there now?", a + b


def _boxes(rng: random.Random) -> tuple[str, int]:
    boxes, each, thing = rng.randint(2, 9), rng.randint(2, 9), rng.choice(THINGS)
    given = rng.randint(1, boxes * each - 1)
    question = f"{rng.choice(NAMES)} has {boxes} boxes of {each} {thing} and gives away {given} {thing}."
    return f"{question} How many {thing} are left?", boxes * each - given


KINDS: tuple[Callable[[random.Random], tuple[str, int]], ...] = (_sum, _difference, _product, _purchase, _boxes)


def problems(seed: int) -> Iterator[Row]:
    """An endless sequence of problems, of one kind after the other."""
    rng = random.Random(seed)
    for index, kind in enumerate(itertools.cycle(KINDS)):
        question, answer = kind(rng)
        yield row(f"{question}\n{INSTRUCTION}", SOURCE, str(answer), index=index, kind=kind.__name__.lstrip("_"))


def main(argv: Sequence[str] | None = None) -> None:
    source, out = parse(__doc__, "data/smollm2", argv)
    num_rows = min(NUM_HELD_OUT + NUM_TRAIN, source.limit or NUM_HELD_OUT + NUM_TRAIN)
    made = list(itertools.islice(unique(problems(1), lambda entry: entry["prompt"][0]["content"]), num_rows))
    write_rows(made[: min(NUM_HELD_OUT, num_rows // 4)], out / "test.parquet")
    write_rows(made[min(NUM_HELD_OUT, num_rows // 4) :], out / "train.parquet")


if __name__ == "__main__":
    main()
