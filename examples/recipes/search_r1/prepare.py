"""Prepare the questions of Search-R1: Natural Questions and HotpotQA.

python -m examples.recipes.search_r1.prepare --out data/search_r1

Each row names the agent `tool_agent`. The passages are a separate file: see the README.
"""

from collections.abc import Iterator, Sequence

from examples.recipes.sources import Row, Source, parse, row, write_rows

DATASET = "PeterJinGo/nq_hotpotqa_train"
NUM_VALIDATION = 500
QUESTION = (
    "Answer the question. Look up what you do not know with the tool search, as often as you need. Then write the "
    "answer, without any explanation, in <answer> </answer>, for example <answer>Beijing</answer>.\n\n"
    "Question: {question}"
)


def questions(source: Source, split: str) -> Iterator[Row]:
    for index, entry in enumerate(source.rows(DATASET, f"{split}.parquet")):
        data_source = f"searchR1_{entry['data_source']}"
        prompt = QUESTION.format(question=entry["question"])
        truth = {"target": list(entry["golden_answers"])}
        yield row(prompt, data_source, truth, index=index, agent="tool_agent", split=split)


def main(argv: Sequence[str] | None = None) -> None:
    source, out = parse(__doc__, "data/search_r1", argv)
    write_rows(questions(source, "train"), out / "train.parquet")
    held_out = list(questions(source, "test"))
    spread = held_out[:: max(1, len(held_out) // NUM_VALIDATION)]  # the file has its sources one after the other
    write_rows(spread[:NUM_VALIDATION], out / "test.parquet")


if __name__ == "__main__":
    main()
