"""Supervised examples: which part of a row is trained, several files, and limits on length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import AutoTokenizer

from penstock.config.dataset import WeightedFile
from penstock.config.loading import load_overrides
from penstock.errors import InvalidInput
from penstock_tools.sft.data import ExampleReader, Examples, batch_of_examples

MODEL = Path(__file__).parents[3] / "examples" / "arithmetic" / "model"
"""A tokenizer of characters. Its chat template joins the contents, with an end token after the assistant's."""
EOS = 1
CONTEXT = 32


def ids(text: str) -> list[int]:
    return [3 + "0123456789+-*/=".index(character) for character in text]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def read(files: Any, **settings: Any) -> Examples:
    config = load_overrides({"model": {"path": str(MODEL)}, "sft": settings}, [])
    return ExampleReader(config, AutoTokenizer.from_pretrained(MODEL), CONTEXT).read(files)


def examples(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> list[tuple[list[int], list[int]]]:
    found = read(write(tmp_path / "data.parquet", rows), **settings)
    return [(list(one.token_ids), list(one.loss_mask)) for row in found.rows for one in row]


def test_each_shape_trains_what_it_says(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "34"}]
    expected = ([*ids("1+2=34"), EOS], [0, 0, 0, 0, 1, 1, 1])
    assert examples(tmp_path, [{"messages": messages}]) == [expected]
    assert examples(tmp_path, [{"prompt": "1+2=", "response": "34"}]) == [expected]
    assert examples(tmp_path, [{"prompt": messages[:1], "response": "34"}]) == [expected]
    assert examples(tmp_path, [{"text": "1+2=34"}]) == [([*ids("1+2=34"), EOS], [0, 1, 1, 1, 1, 1, 1])]
    named = {"columns": {"prompt": "question", "response": "answer"}}
    assert examples(tmp_path, [{"question": "1+2=", "answer": "34"}], **named) == [expected]


def test_a_text_prompt_may_be_the_users_message_and_a_field_of_a_column(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = (
        "{% for m in messages %}+{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    data = write(tmp_path / "data.parquet", [{"extra": {"question": "12", "answer": "34"}}])
    columns = {"prompt": "extra.question", "response": "extra.answer"}
    for kind, prompt in (("text", "12"), ("user", "+12=")):
        sft = {"columns": columns, "text_prompts": kind}
        config = load_overrides({"model": {"path": str(MODEL)}, "sft": sft}, [])
        [[found]] = ExampleReader(config, tokenizer, CONTEXT).read(data).rows
        assert list(found.token_ids) == [*ids(f"{prompt}34"), EOS]
        assert list(found.loss_mask) == [0] * len(prompt) + [1, 1, 1]


def test_all_turns_or_the_last_are_trained(tmp_path: Path) -> None:
    turns = [("user", "1+"), ("assistant", "2"), ("user", "3"), ("assistant", "45")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turns]}]
    tokens = [*ids("1+2"), EOS, *ids("345"), EOS]
    assert examples(tmp_path, rows) == [(tokens, [0, 0, 1, 1, 0, 1, 1, 1])]
    assert examples(tmp_path, rows, train_on="last") == [(tokens, [0, 0, 0, 0, 0, 1, 1, 1])]
    batch = batch_of_examples(read(tmp_path / "data.parquet").rows[0])
    assert batch.prompt_lengths.tolist() == [2] and batch.loss_mask.tolist() == [1, 1, 0, 1, 1, 1]


def test_files_patterns_and_weights_are_read_in_order(tmp_path: Path) -> None:
    for name, digits in (("b.jsonl", "3"), ("a1.parquet", "12"), ("a2.jsonl", "45")):
        write(tmp_path / name, [{"prompt": f"{digit}=", "response": digit} for digit in digits])
    found = read((tmp_path / "a*", WeightedFile(file=tmp_path / "b.jsonl", weight=2)))
    assert [row[0].token_ids[0] for row in found.rows] == ids("12453")
    assert found.parts == [(4, 1.0), (1, 2.0)]
    other = read((tmp_path / "a*", tmp_path / "b.jsonl"))
    assert found.fingerprint != other.fingerprint, "weights change what an epoch has"


def test_rows_that_are_too_long_are_refused_dropped_or_cut_and_counted(tmp_path: Path) -> None:
    prompts = ("1+2=", "11+22=", "111+222=")
    data = write(tmp_path / "data.parquet", [{"prompt": prompt, "response": "33"} for prompt in prompts])
    with pytest.raises(InvalidInput, match=r"data.parquet row 1: has 9 tokens, more than 8; set sft.too_long"):
        read(data, max_tokens=8)
    dropped = read(data, max_tokens=8, too_long="drop")
    assert (len(dropped.rows), dropped.num_dropped, dropped.num_cut) == (1, 2, 0)
    cut = read(data, max_tokens=8, too_long="cut")
    # The third row is dropped, because the cut would leave only its prompt.
    assert (len(cut.rows), cut.num_dropped, cut.num_cut) == (2, 1, 1)
    assert cut.rows[1][0].token_ids == tuple(ids("11+22=33")) and sum(cut.rows[1][0].loss_mask) == 2
    assert "2 rows in 2 sequences, 15 tokens of which 5 are trained; 1 rows dropped and 1 cut as too long" in str(cut)
    with pytest.raises(InvalidInput, match="has no row that fits into 4 tokens"):
        read(data, max_tokens=4, too_long="drop")
    with pytest.raises(InvalidInput, match="sft.max_tokens: is 33, but the model's context has 32"):
        read(data, max_tokens=CONTEXT + 1)
    long = write(tmp_path / "long.parquet", [{"text": "1" * CONTEXT}])
    with pytest.raises(InvalidInput, match="has 33 tokens, more than 32"):
        read(long)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "1"}, "row 0: has no `messages`"),
        ({"messages": [{"role": "user", "content": "1"}]}, "has no message of the assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "has content of type image"),
        ({"prompt": "", "response": "1"}, "has no `messages`"),
        ({"text": "1", "images": ["a.png"]}, "images, videos and audio are not supported"),
        ({"messages": [{"role": "assistant", "content": "1"}]}, "begins with a message of the assistant"),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        examples(tmp_path, [row])
