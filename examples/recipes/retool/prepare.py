"""Prepare DAPO-Math-17k and AIME 2024 for an agent with a code interpreter.

python -m examples.recipes.retool.prepare --out data/retool

The problems are those of the recipe math_dapo. Each row names the agent `tool_agent`, and a system message says when to
use the tool.
"""

from collections.abc import Iterator, Sequence

from examples.recipes.math_dapo.prepare import AIME, TRAIN, problems
from examples.recipes.sources import Row, Source, parse, write_rows

SYSTEM = (
    "You solve mathematical problems. You may run Python with the tool code_interpreter, as often as you need, to "
    "compute or to check a step; print what you want to see. Then answer in the form that the problem asks for."
)


def with_tools(source: Source, dataset: tuple[str, str, str]) -> Iterator[Row]:
    for entry in problems(source, dataset, agent="tool_agent"):
        yield entry | {"prompt": [{"role": "system", "content": SYSTEM}, *entry["prompt"]]}


def main(argv: Sequence[str] | None = None) -> None:
    source, out = parse(__doc__, "data/retool", argv)
    write_rows(with_tools(source, TRAIN), out / "train.parquet")
    write_rows(with_tools(source, AIME), out / "aime2024.parquet")


if __name__ == "__main__":
    main()
