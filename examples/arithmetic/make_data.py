"""Write `train.parquet` and `heldout.parquet`: two-digit additions in verl's schema.

    python make_data.py --out .

The problems are `a+b=` with a and b from 10 to 99. The split is over unordered pairs: if 47+85 is held out, then 85+47
is not in the training set either. `make_model.py` uses the same split, so no stage of training sees a held-out sum.
"""

import argparse
import random
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "penstock/arithmetic"
NUM_HELDOUT = 512
NUM_TRAIN_ROWS = 4096
SPLIT_SEED = 20240

Problem = tuple[int, int]

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64())])),
    ]
)


def question(problem: Problem) -> str:
    return f"{problem[0]}+{problem[1]}="


def answer(problem: Problem) -> str:
    return str(problem[0] + problem[1])


def split_problems() -> tuple[list[Problem], list[Problem]]:
    """The shuffled training problems (both orders of each pair) and held-out problems (one order of each pair)."""
    rng = random.Random(SPLIT_SEED)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    heldout = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in pairs[:NUM_HELDOUT]]
    train = sorted({p for a, b in pairs[NUM_HELDOUT:] for p in ((a, b), (b, a))})
    rng.shuffle(train)
    return train, heldout


def write_parquet(problems: Iterable[Problem], split: str, path: Path) -> None:
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question(problem)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer(problem)},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, compression="zstd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the two files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train, heldout = split_problems()
    write_parquet(train[:NUM_TRAIN_ROWS], "train", args.out / "train.parquet")
    write_parquet(heldout, "heldout", args.out / "heldout.parquet")


if __name__ == "__main__":
    main()
