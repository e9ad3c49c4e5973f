"""Ranks that share sequences compute what one rank does: every role, with fewer key heads than ranks, and packed
sequences that begin and end inside a rank's slice."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.config.loading import validate
from penstock.errors import ConfigError
from penstock_learner.model.architectures import path_of, require_parallel
from penstock_learner.model.attention.sequence_parallel import SequenceParallel
from penstock_learner.roles.role_group import worker_of
from penstock_learner.start_check import _check_structure
from support.forked_process import ForkedProcess
from support.sharing_rank import SIZES, config_of, some_batch
from support.tiny_architectures import tiny_config, tiny_model, with_random_weights
from support.tiny_models import write_tokenizer

RANK = "support.sharing_rank"
IMPORTED = ["transformers.models.llama.modeling_llama", RANK]
HEADS = {"1-of-4": (4, 1), "2-of-8": (8, 2)}
"""Key heads of query heads. Four ranks share one or two key heads, of which they get copies."""


def write_models(folder: Path, heads: int, key_heads: int) -> None:
    from transformers import AutoModelForSequenceClassification

    sizes = {
        "num_attention_heads": heads, "num_key_value_heads": key_heads, "hidden_size": 8 * heads,
        "num_hidden_layers": 2,
    }  # fmt: skip
    tiny_model("llama", **sizes).save_pretrained(folder / "causal")
    config = tiny_config("llama", **sizes, num_labels=1, architectures=["LlamaForSequenceClassification"])
    model = AutoModelForSequenceClassification.from_config(config)
    with_random_weights(model, 1).save_pretrained(folder / "scalar")
    for kind in ("causal", "scalar"):
        write_tokenizer(folder / kind, 96)


def run_ranks(folder: Path, num_ranks: int, *words: str) -> None:
    processes = []
    try:
        for rank in range(num_ranks):
            output = folder / f"rank-{rank}.log"
            processes.append(ForkedProcess(RANK, [str(rank), str(folder), *words], output, {}, IMPORTED))
        codes = [process.wait(280) for process in processes]
        assert not any(codes), "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("rank-*.log")))
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What real rank processes wrote."""
    root = tmp_path_factory.mktemp("sharing")
    for name, sizes in HEADS.items():
        write_models(root / name, *sizes)
    run_ranks(root, max(SIZES))
    return root


@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared prefixes"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("model", list(HEADS))
def test_every_role_computes_what_one_rank_does(folder: Path, model: str, num_ranks: int, shared: bool) -> None:
    expected = load_file(folder / f"{model}-1.safetensors")
    found = load_file(folder / f"{model}-{num_ranks}{'-shared' * shared}.safetensors")
    assert set(found) == {name for name in expected if not shared or name not in ("reward_model", "judge")}
    assert {"policy", "reference", "critic"} < found.keys()
    for name, tensor in found.items():
        scale = float(expected[name].abs().max())
        assert scale > 1e-6, name
        torch.testing.assert_close(tensor, expected[name], atol=2e-5 * max(scale, 0.1), rtol=1e-4, msg=name)


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (8, 1), (8, 2), (8, 8), (12, 2), (12, 3), (12, 4), (12, 6)])
def test_every_rank_gets_the_key_heads_of_its_queries(heads: int, key_heads: int) -> None:
    keys = torch.arange(key_heads).view(1, key_heads, 1)
    for size in (size for size in range(1, heads + 1) if heads % size == 0):
        spread = SequenceParallel(None, 0, size)._spread(keys).flatten()  # type: ignore[arg-type]
        assert len(spread) == math.lcm(key_heads, size), "no more copies than needed"
        of_queries = spread.repeat_interleave(heads // len(spread))  # as attention repeats them, in every rank's slice
        assert of_queries.tolist() == [head * key_heads // heads for head in range(heads)]


def test_the_slices_of_ranks_begin_inside_sequences(folder: Path) -> None:
    """The batch of the test above is one that shows what it should."""
    batch = some_batch(config_of(folder / "1-of-4", 4, shared=False))
    ends = np.cumsum(batch.lengths)
    share = -(-int(ends[-1]) // 4)
    assert not set(ends.tolist()) & {share, 2 * share, 3 * share} and batch.num_sequences > 4


def test_the_start_refuses_an_exchange_of_the_wrong_heads(folder: Path) -> None:
    said = json.loads((folder / "checks.json").read_text())
    assert said.startswith("model.path: llama on the packed path differs from Hugging Face's own forward by ")


@pytest.mark.long
def test_every_type_of_model_computes_what_one_rank_does(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, "types")
    found = json.loads((tmp_path / "types.json").read_text())
    assert len([reason for reason in found.values() if not reason]) > 60
    assert {
        name: reason for name, reason in found.items() if reason and "refused: learner.sequence_parallel " not in reason
    } == {}


@pytest.mark.parametrize("num_sharing", [2, 4])
def test_there_may_be_as_many_ranks_as_query_heads(num_sharing: int) -> None:
    config = tiny_config("qwen2", num_attention_heads=4, num_key_value_heads=1)
    require_parallel(config, path_of(config), num_sharing)
    with pytest.raises(ConfigError, match=r"sequence_parallel 3 must be a divisor of the model's 4 attention heads$"):
        require_parallel(config, path_of(config), 3)


@pytest.mark.parametrize("role", ["reference", "critic", "reward_model"])
def test_a_role_whose_model_cannot_be_shared_is_refused_at_the_start(role: str, tmp_path: Path) -> None:
    tiny_config("qwen2").save_pretrained(tmp_path / "policy")
    for name, settings in (("qwen3_next", {}), ("qwen2", {"num_attention_heads": 3, "num_key_value_heads": 3})):
        tiny_config(name, **settings).save_pretrained(tmp_path / "own")
        own = {"path": str(tmp_path / "own"), "num_ranks": 2, "sequence_parallel": 2}
        advantage = {"name": "gae"} if role == "critic" else {"name": "grpo"}
        learner = {role: own, "algorithm": {"advantage": advantage, "kl": {"placement": "loss"}}}
        config = validate({"model": {"path": str(tmp_path / "policy")}, "learner": learner}, "test")
        with pytest.raises(ConfigError, match=rf"^learner.{role}.sequence_parallel .*must be (1|a divisor) "):
            _check_structure(config)


@pytest.mark.parametrize("role", ["policy", "reference", "critic"])
def test_ranks_refuse_to_share_sequences_of_a_model_that_is_padded(role: str, tmp_path: Path) -> None:
    """Before they read its weights: a learner that starts need not have been checked."""
    tiny_model("gpt2").save_pretrained(tmp_path)
    sharing = {"num_ranks": 2, "sequence_parallel": 2}
    own = {"policy": {"num_ranks": 2}, "sequence_parallel": 2} if role == "policy" else {role: sharing}
    algorithm = {"advantage": {"name": "gae" if role == "critic" else "grpo"}, "kl": {"placement": "loss"}}
    config = validate({"model": {"path": str(tmp_path)}, "learner": own | {"algorithm": algorithm}}, "test")
    section = "learner" if role == "policy" else f"learner.{role}"
    with pytest.raises(
        ConfigError, match=rf"^{section}.sequence_parallel must be 1 with a model of type gpt2: type gpt2"
    ):
        worker_of(config.learner, role)(config, 0, 2).load()


def test_the_ranks_of_a_role_are_whole_groups() -> None:
    learner = {"critic": {"num_ranks": 3, "sequence_parallel": 2}, "algorithm": {"advantage": {"name": "gae"}}}
    with pytest.raises(ConfigError, match=r"critic.num_ranks must be a multiple of its sequence_parallel"):
        validate({"model": {"path": "m"}, "learner": learner}, "test")
