"""Prepare DAPO-Math-17k for training and AIME 2024 for validation.

python -m examples.recipes.math_dapo.prepare --out data/math_dapo

Both datasets are on the Hub in verl's schema and repeat every problem; here each problem is written once.
"""

from collections.abc import Iterator, Sequence

from examples.recipes.sources import Row, Source, parse, row, unique, write_rows

TRAIN = ("BytedTsinghua-SIA/DAPO-Math-17k", "data/*.parquet", "math_dapo")
AIME = ("BytedTsinghua-SIA/AIME-2024", "data/*.parquet", "aime2024")


def problems(source: Source, dataset: tuple[str, str, str], agent: str = "") -> Iterator[Row]:
    """The problems with the prompts of the dataset, which ask for the answer in a last line `Answer: …`."""
    name, pattern, data_source = dataset
    entries = unique(source.rows(name, pattern), lambda entry: entry["prompt"][-1]["content"])
    for index, entry in enumerate(entries):
        truth = entry["reward_model"]["ground_truth"]
        yield row(entry["prompt"], data_source, truth, index=index, agent=agent)


def main(argv: Sequence[str] | None = None) -> None:
    source, out = parse(__doc__, "data/math_dapo", argv)
    write_rows(problems(source, TRAIN), out / "train.parquet")
    write_rows(problems(source, AIME), out / "aime2024.parquet")


if __name__ == "__main__":
    main()
