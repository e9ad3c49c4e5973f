"""Prepare GSM8K: 7473 training and 1319 test problems.

python -m examples.recipes.gsm8k.prepare --out data/gsm8k
"""

from collections.abc import Iterator, Sequence

from examples.recipes.sources import Row, Source, parse, row, write_rows

DATASET = "openai/gsm8k"
INSTRUCTION = "Think step by step. Then write #### and the final number alone on the last line."


def problems(source: Source, split: str) -> Iterator[Row]:
    """The answer of a row is a worked solution that ends in `#### 42`."""
    for index, entry in enumerate(source.rows(DATASET, f"main/{split}-*.parquet")):
        answer = entry["answer"].rpartition("####")[2].strip().replace(",", "")
        yield row(f"{entry['question']}\n\n{INSTRUCTION}", DATASET, answer, index=index, split=split)


def main(argv: Sequence[str] | None = None) -> None:
    source, out = parse(__doc__, "data/gsm8k", argv)
    write_rows(problems(source, "train"), out / "train.parquet")
    write_rows(problems(source, "test"), out / "test.parquet")


if __name__ == "__main__":
    main()
