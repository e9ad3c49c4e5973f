"""Dataset files: all formats give the same prompts, and a wrong row is named."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.codec import decode_prompt, encode_prompt
from penstock.config.dataset import ColumnsConfig, DatasetConfig
from penstock.config.service import GatewayLimits
from penstock.errors import ConfigError, InvalidInput
from penstock.feed.datasets import read_files, read_prompts
from penstock.trajectory import Prompt, Sampling

SAMPLING = Sampling(temperature=0.5, max_tokens=9)
ROWS: list[dict[str, Any]] = [
    {
        "data_source": "gsm8k",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{i}+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i, "split": "train"},
        "agent_name": "tool_agent" if i else None,
    }
    for i in range(3)
]


FORMATS = ["train.parquet", "train.jsonl", "train"]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if not path.suffix:
        write_folder(path, rows)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_folder(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a folder as `datasets.Dataset.save_to_disk(path, num_shards=2)` of datasets 4.4 does."""
    path.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    middle = (len(rows) + 1) // 2
    names = [f"data-{index:05d}-of-00002.arrow" for index in range(2)]
    for name, part in zip(names, (table.slice(0, middle), table.slice(middle)), strict=True):
        with pa.ipc.new_stream(str(path / name), table.schema) as stream:
            stream.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "c6275756191e6de1", "_split": None}
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text("{}")


def read(path: Path) -> list[Prompt]:
    return list(read_prompts(path, num_samples=4, sampling=SAMPLING))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_become_prompts(tmp_path: Path, name: str) -> None:
    prompts = read(write(tmp_path / name, ROWS))
    assert prompts[1] == Prompt(
        messages=(("system", "Be brief."), ("user", "1+1?")),
        sampling=SAMPLING,
        num_samples=4,
        agent_name="tool_agent",
        data_source="gsm8k",
        ground_truth="2",
        extra_info={"index": 1, "split": "train"},
    )
    assert [prompt.agent_name for prompt in prompts] == ["", "tool_agent", "tool_agent"]


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_prompt_is_needed(tmp_path: Path, name: str) -> None:
    [prompt] = read(write(tmp_path / name, [{"prompt": [{"role": "user", "content": ""}]}]))
    assert (prompt.ground_truth, prompt.extra_info, prompt.data_source) == (None, {}, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": 7}, r'line 3: prompt: must be a list like \[\{"role"'),
        ({"prompt": []}, "line 3: prompt: must be .* not empty"),
        ({"prompt": None}, "line 3: prompt: must be .* not missing"),
        ({"prompt": [{"role": "user"}]}, r"line 3: prompt\[0\]: must have a `role` and a `content`"),
        ({"prompt": [{"role": "user", "content": ["image"]}]}, r"line 3: prompt\[0\]: "),
        ({"prompt": [{"role": "user", "content": "x", "weight": 1}]}, r"prompt\[0\]: has the field weight"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, r"prompt\[0\]: has content of type image"),
        ({"images": ["a.png"]}, "line 3: images: images, videos and audio are not supported"),
        ({"reward_model": "4"}, "line 3: reward_model: must be an object, not str"),
        ({"extra_info": [1]}, "line 3: extra_info: must be an object, not list"),
        ({"extra_info": {"x": float("nan")}}, "line 3: extra_info: cannot be written as JSON"),
        ({"data_source": 7}, "line 3: data_source: must be text, not int"),
        ({"data_source": "x" * 257}, "line 3: data_source: may have 256 characters, none of them a control"),
        ({"agent_name": "x" * 257}, "line 3: agent_name: may have 256 characters, none of them a control"),
        ({"data_source": "a\nb"}, "line 3: data_source: may have 256 characters, none of them a control"),
        ({"data_source": "a\u2028b"}, "line 3: data_source: may have 256 characters, none of them a control"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1] | change) + "\n")
    with pytest.raises(InvalidInput, match=message):
        read(path)


@pytest.mark.parametrize("name", ["数学\u3000一", "a\u00a0b", "\U0001f469\u200d\U0001f52c", "می\u200cخواهم"])
def test_names_of_every_script_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": "a", "data_source": name, "agent_name": name}) + "\n")
    [prompt] = read(path)
    assert (prompt.data_source, prompt.agent_name) == (name, name)


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n{oops\n")
    with pytest.raises(InvalidInput, match="train.jsonl line 2: is not JSON"):
        read(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "extra_info": {"x": ' + 5000 * "1" + "}}", "line 1: is not JSON"),
        (r'{"prompt": "\ud800"}', "line 1: holds text that UTF-8 cannot write"),
        (r'{"prompt": "a", "data_source": "\ud800"}', "line 1: holds text that UTF-8 cannot write"),
        (f'{{"prompt": "a", "extra_info": {{"x": {195 * "["}{195 * "]"}}}}}', "extra_info: cannot be written as JSON"),
        (r'{"prompt": "a", "extra_info": {"x": "\ud800"}}', "line 1: extra_info: cannot be written as JSON"),
        (r'{"prompt": "a", "reward_model": {"ground_truth": "\ud800"}}', "ground_truth: cannot be written as JSON"),
        ('{"prompt": "a", "extra_info": {"x": ' + "[" * 300 + "]" * 300 + "}}", "extra_info: cannot be written"),
    ],
)
def test_values_that_nothing_can_hold_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InvalidInput, match=message):
        read(path)


def test_parquet_values_that_python_cannot_hold_are_refused(tmp_path: Path) -> None:
    no_text = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    no_date = pa.StructArray.from_arrays([pa.array([2**62]).cast(pa.timestamp("us"))], ["at"])
    for table in (pa.table({"prompt": no_text}), pa.table({"prompt": ["a"], "extra_info": no_date})):
        path = tmp_path / "train.parquet"
        pq.write_table(table, path)
        with pytest.raises(InvalidInput, match="cannot be read as Parquet"):
            read(path)


@pytest.mark.parametrize(
    ("value", "is_kept"),
    [
        (1e300, True), (2**63 - 1, True), (True, True), ("\x00", True), ([[1], [2]], True),
        ({"a": {"b": [None, 0.5]}}, True), (float("nan"), False), (float("inf"), False), (Decimal("1.5"), False),
        (datetime(2026, 1, 2), False), (b"\x00\xff", False),
    ],
)  # fmt: skip
def test_a_parquet_value_is_kept_as_it_is_or_refused(tmp_path: Path, value: Any, is_kept: bool) -> None:
    path = write(tmp_path / "train.parquet", [{"prompt": "x", "reward_model": {"ground_truth": value}}])
    with contextlib.nullcontext() if is_kept else pytest.raises(InvalidInput, match="row 0"):
        [prompt] = read(path)
        assert decode_prompt(encode_prompt(prompt)).ground_truth == value


def test_a_wrong_parquet_row_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", [ROWS[0], ROWS[1] | {"prompt": []}])
    with pytest.raises(InvalidInput, match="train.parquet row 1: prompt: must be"):
        read(path)
    path = write(tmp_path / "bytes.parquet", [ROWS[0] | {"extra_info": {"image": b"\0"}}])
    with pytest.raises(InvalidInput, match="row 0: extra_info: cannot be written as JSON"):
        read(path)


def test_a_parquet_file_without_prompts_says_what_it_has(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", [{"question": "2+2?", "answer": "4"}])
    with pytest.raises(InvalidInput, match="no column `prompt`, only question, answer; name the one"):
        read(path)


@pytest.mark.parametrize("name", FORMATS)
def test_a_text_is_one_message_of_the_user(tmp_path: Path, name: str) -> None:
    prompts = read(write(tmp_path / name, [{"prompt": "2+2?"}, {"prompt": "3+3?"}]))
    assert [prompt.messages for prompt in prompts] == [(("user", "2+2?"),), (("user", "3+3?"),)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_field_of_a_message_reaches_the_template(tmp_path: Path, name: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    chat = [
        {"role": "user", "name": "ann", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [prompt] = read(write(tmp_path / name, [{"prompt": chat}]))
    assert prompt.chat == chat
    assert decode_prompt(encode_prompt(prompt)).chat == chat
    [prompt] = read(write(tmp_path / f"{name}2.jsonl", [{"prompt": [{"role": "user", "content": parts}]}]))
    assert prompt.chat == [{"role": "user", "content": "ab"}]


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", [{"question": "2+2?", "answer": "so\n#### 4", "meta": {"id": 1}}])
    columns = ColumnsConfig(prompt="question", ground_truth="answer", extra_info="meta")
    config = DatasetConfig(file=path, columns=columns, data_source="openai/gsm8k")
    [(weight, [prompt])] = read_files(path, config, 2, SAMPLING)
    assert (weight, prompt.messages, prompt.num_samples) == (1.0, (("user", "2+2?"),), 2)
    assert (prompt.ground_truth, prompt.extra_info, prompt.data_source) == ("so\n#### 4", {"id": 1}, "openai/gsm8k")


@pytest.mark.parametrize("name", FORMATS)
def test_a_column_that_the_config_names_must_be_there(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [{"question": "2+2?", "answer": "4"}, {"question": "1+1?", "answer": None}])
    columns = ColumnsConfig(prompt="question", ground_truth="answer")
    [(_, prompts)] = read_files(path, DatasetConfig(file=path, columns=columns), 1, SAMPLING)
    assert [prompt.ground_truth for prompt in prompts] == ["4", None]
    misspelt = DatasetConfig(file=path, columns=columns.model_copy(update={"ground_truth": "anser.text"}))
    with pytest.raises(InvalidInput, match=r"has no column `anser\.text`; correct dataset\.columns\.ground_truth"):
        read_files(path, misspelt, 1, SAMPLING)


def test_a_dataset_of_the_config_has_no_name_of_an_uploaded_one() -> None:
    """Both are positions in one list, so each would be submitted where the other has ended."""
    with pytest.raises(ValueError, match="names that begin with upload- are those of uploaded datasets"):
        DatasetConfig(name="upload-x")


def test_weights_that_would_have_no_effect_are_refused(tmp_path: Path) -> None:
    weighted = [{"file": "a.jsonl", "weight": 0.5}]
    with pytest.raises(ValueError, match="the rows of a loader have no weights"):
        DatasetConfig.model_validate({"file": weighted, "loader": "rows.py:Rows"})
    with pytest.raises(ValueError, match="every row is validated once"):
        DatasetConfig.model_validate({"validation": {"file": weighted}})


def test_lists_and_patterns_with_weights(tmp_path: Path) -> None:
    for name in ("b1", "b0", "a"):
        write(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    config = DatasetConfig.model_validate(
        {"file": [f"{tmp_path}/a.jsonl", {"file": f"{tmp_path}/b*.jsonl", "weight": 0.5}]}
    )
    assert config.file is not None
    read_in = read_files(config.file, config, 1, SAMPLING)
    assert [(weight, [prompt.messages[0][1] for prompt in part]) for weight, part in read_in] == [
        (1.0, ["a"]), (0.5, ["b0", "b1"]),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"no file matches dataset .*c\*\.jsonl"):
        read_files(tmp_path / "c*.jsonl", config, 1, SAMPLING)


LOADER = """
from pathlib import Path

class Rows:
    def __init__(self, files, limit):
        self.texts = [line for file in files for line in Path(file).read_text().split()][:limit]
    def __len__(self):
        return len(self.texts)
    def __getitem__(self, index):
        return {"prompt": self.texts[index], "data_source": "mine"}

def failing(files):
    yield {"prompt": "x"}
    raise KeyError("answer")

def wrong(files):
    yield {"question": "x"}
"""


def test_a_loader_of_the_users_own_gives_the_rows(tmp_path: Path) -> None:
    (tmp_path / "my_data.py").write_text(LOADER)
    (tmp_path / "words.txt").write_text("one two three")
    text, loader = tmp_path / "words.txt", f"{tmp_path}/my_data.py:"
    config = DatasetConfig(file=text, loader=f"{loader}Rows", loader_kwargs={"limit": 2})
    [(_, prompts)] = read_files(text, config, 1, SAMPLING)
    assert [(prompt.messages[0][1], prompt.data_source) for prompt in prompts] == [("one", "mine"), ("two", "mine")]
    for name, message in (("failing", "failed: KeyError: 'answer'"), ("wrong", r"wrong row 0: prompt: must be")):
        with pytest.raises(InvalidInput, match=message):
            read_files(text, DatasetConfig(file=text, loader=loader + name), 1, SAMPLING)


def test_a_folder_of_splits_wants_one_of_them(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write(tmp_path / "data" / name, ROWS[:1] if name == "test" else ROWS)
    (tmp_path / "data" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InvalidInput, match="has the splits train, test; choose one, as in .*data/train"):
        read(tmp_path / "data")
    assert len(read(tmp_path / "data" / "train")) == 3 and len(read(tmp_path / "data" / "test")) == 1
    (tmp_path / "data" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert len(read(tmp_path / "data")) == 1


def test_folders_that_are_not_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="not a dataset that save_to_disk wrote"):
        read(tmp_path)
    write(tmp_path / "train", ROWS)
    (tmp_path / "train" / "data-00001-of-00002.arrow").write_bytes(b"not arrow")
    with pytest.raises(InvalidInput, match="cannot be read as Arrow"):
        read(tmp_path / "train")
    write(tmp_path / "other", [{"question": "2+2?"}])
    with pytest.raises(InvalidInput, match="no column `prompt`, only question"):
        read(tmp_path / "other")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("not parquet")
    (tmp_path / "train.csv").write_text("prompt")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe\n")
    for name, message in (
        ("absent.jsonl", "is not a file"),
        ("absent", "is not a file"),
        ("train.csv", "neither .parquet nor .jsonl"),
        ("text.parquet", "cannot be read as Parquet"),
        ("latin.jsonl", "cannot be read as UTF-8"),
    ):
        with pytest.raises(InvalidInput, match=message):
            read(tmp_path / name)


LIMITS = GatewayLimits(max_dataset_prompts=100, max_dataset_bytes=2**25)
TOO_LARGE = "decodes to more than 33554432 bytes; split it|takes too much memory to decode; split it"
"""Which of the two comes first depends on the versions of Arrow and the system."""


def read_limited(path: Path) -> list[Prompt]:
    return list(read_prompts(path, num_samples=1, sampling=SAMPLING, limits=LIMITS))


def repeated(text: str, num_times: int) -> pa.Array:
    """One row, a list of messages that are all the same."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * num_times, pa.int32()), pa.array([text]))
    messages = pa.StructArray.from_arrays([texts, texts], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array([0, num_times], pa.int32()), messages)


def test_every_value_of_a_parquet_file_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": repeated("u", 1_000_000)}), path, write_statistics=False, store_schema=False)
    assert path.stat().st_size < 2**14
    with pytest.raises(InvalidInput, match=TOO_LARGE):
        read_limited(path)


def test_a_parquet_file_cannot_lie_about_its_size(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": [2**26 * "u"]}), path, compression="zstd", use_dictionary=False)
    group = pq.ParquetFile(path).metadata.row_group(0)
    content = path.read_bytes()
    for number in {group.total_byte_size, group.column(0).total_uncompressed_size}:
        true = varint(2 * number)
        content = content.replace(true, b"\x82" + (len(true) - 2) * b"\x80" + b"\x00")
    path.write_bytes(content)
    assert pq.ParquetFile(path).metadata.row_group(0).total_byte_size == 1
    with pytest.raises(InvalidInput, match=TOO_LARGE):
        read_limited(path)


def varint(number: int) -> bytes:
    """A number as the footer of a Parquet file has it."""
    *rest, last = [number >> shift & 0x7F for shift in range(0, number.bit_length(), 7)]
    return bytes([part | 0x80 for part in rest] + [last])


@pytest.fixture
def arrow_memory() -> Iterator[pa.MemoryPool]:
    """Arrow's memory in this test, with its peak."""
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    yield pool
    pa.set_memory_pool(usual)


@pytest.mark.parametrize(("num_times", "store_schema"), [(300, False), (300, True), (6000, False)])
def test_a_row_that_repeats_a_text_takes_no_memory_here(
    tmp_path: Path, arrow_memory: pa.MemoryPool, num_times: int, store_schema: bool
) -> None:
    """The row would take 600 MB, or more than the process that decodes it may take."""
    path = tmp_path / "train.parquet"
    texts = pa.table({"prompt": repeated(2**20 * "u", num_times)})
    pq.write_table(texts, path, compression="zstd", store_schema=store_schema)
    assert path.stat().st_size < 2**14
    before = arrow_memory.max_memory()
    with pytest.raises(InvalidInput, match=TOO_LARGE):
        read_limited(path)
    assert arrow_memory.max_memory() < max(before, 2**25)


@pytest.mark.parametrize(
    "options",
    [{"column_encoding": "DELTA_BYTE_ARRAY", "data_page_size": 2**27}, {"column_encoding": "PLAIN"}],
)
def test_texts_of_every_encoding_are_counted(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": [2**20 * "u"] * 60}), path, use_dictionary=False, **options)
    with pytest.raises(InvalidInput, match=TOO_LARGE):
        read_limited(path)


def test_values_of_a_fixed_length_count_as_often_as_they_are_repeated(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    images = pa.array([2**20 * b"u"] * 60, pa.binary(2**20))
    pq.write_table(pa.table({"prompt": ["a"] * 60, "agent_name": images}), path)
    assert path.stat().st_size < 2**21
    with pytest.raises(InvalidInput, match=TOO_LARGE):
        read_limited(path)


def test_a_file_whose_decoder_dies_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    monkeypatch.setattr(sys, "executable", write_script(tmp_path / "dies", "#!/bin/sh\nkill -ABRT $$\n"))
    with pytest.raises(InvalidInput, match=r"is damaged, or takes too much memory or time to decode \(-6\); split it"):
        read_limited(path)


def test_a_decoder_that_does_not_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    loud = "#!/bin/sh\nhead -c 1000000 /dev/zero >&2\nexec sleep 600\n"
    monkeypatch.setattr(sys, "executable", write_script(tmp_path / "hangs", loud))
    monkeypatch.setattr("penstock.feed.parquet_rows._DEADLINE_S", 0.5)
    with pytest.raises(InvalidInput, match="takes more than 0 s to decode; split it"):
        read_limited(path)


def test_only_the_other_process_opens_a_strangers_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "train.parquet", ROWS)
    for name in ("ParquetFile", "read_metadata", "read_schema", "read_table"):
        monkeypatch.setattr(pq, name, None)
    assert len(read_limited(path)) == len(ROWS)


def test_columns_are_refused_by_name(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "twice.parquet")
    pq.write_table(pa.table({f"column{n}": ["a"] for n in range(90)}), tmp_path / "none.parquet")
    with pytest.raises(InvalidInput, match="cannot be read as Parquet"):
        read_limited(tmp_path / "twice.parquet")
    with pytest.raises(InvalidInput, match=r"has no column `prompt`, only column0, .*column49; name the one"):
        read_limited(tmp_path / "none.parquet")


def write_script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dictionary": False},
        {"store_schema": False},
        {"dictionary_pagesize_limit": 16},
        {"data_page_version": "2.0"},
        {"data_page_size": 64},
    ],
)
def test_limits_change_no_parquet_file_that_keeps_them(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = [ROWS[index % 3] | {"extra_info": {"index": index, "parts": [f"{index}", "é"]}} for index in range(100)]
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=40, **options)
    assert read_limited(path) == list(read_prompts(path, num_samples=1, sampling=SAMPLING))


def test_damaged_pages_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    whole = path.read_bytes()
    for at in range(4, 400, 50):
        path.write_bytes(whole[:at] + b"\xff\xff\xff" + whole[at + 3 :])
        with contextlib.suppress(InvalidInput):
            read_limited(path)
