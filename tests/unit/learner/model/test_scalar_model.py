"""Critic and reward model give the same numbers as plain Hugging Face, which runs one sequence at a time."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from penstock.errors import ConfigError
from penstock_learner.batches.sequence_batch import SequenceBatch, batch_of
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.scalar_model import ScalarModel, check_tokenizer
from support.groups import make_group
from support.tiny_models import load_scalar_model, make_tiny_classifier, make_tiny_qwen2

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_classifier(tmp_path_factory.mktemp("classifier"), seed=3)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen2(tmp_path_factory.mktemp("causal"), seed=3)


def load(folder: Path, *, make_head: bool = False) -> ScalarModel:
    return load_scalar_model(folder, torch.float32, key="learner.critic.path", make_head=make_head)


def sequences_of(batch: SequenceBatch) -> list[torch.Tensor]:
    return [torch.as_tensor(ids).unsqueeze(0) for ids in np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1])]


def test_a_score_is_the_head_at_the_last_token_of_each_sequence(classifier: Path) -> None:
    batch = batch_of([make_group(prompt_id) for prompt_id in (1, 2, 3)])
    last = torch.as_tensor(np.cumsum(batch.lengths) - 1)
    scores = load(classifier)(ModelInputs.of(batch, CPU), last)
    plain = AutoModelForSequenceClassification.from_pretrained(classifier, attn_implementation="eager")
    expected = torch.cat([plain(ids).logits[:, 0] for ids in sequences_of(batch)])
    assert expected.std() > 0.1
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_a_value_is_the_head_at_the_token_before(classifier: Path) -> None:
    batch = batch_of([make_group(prompt_id) for prompt_id in (1, 2)])
    inputs = ModelInputs.of(batch, CPU)
    values = load(classifier)(inputs, inputs.predicting)
    plain = AutoModelForSequenceClassification.from_pretrained(classifier, attn_implementation="eager")
    expected = []
    for ids, prompt_length in zip(sequences_of(batch), batch.prompt_lengths.tolist(), strict=True):
        hidden = plain.model(ids).last_hidden_state[0]
        expected.append(plain.score(hidden)[prompt_length - 1 : -1, 0])
    torch.testing.assert_close(values, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_a_causal_model_becomes_a_critic_of_zeros_that_can_learn(causal: Path) -> None:
    inputs = ModelInputs.of(batch_of([make_group(1)]), CPU)
    model = load(causal, make_head=True)
    values = model(inputs, inputs.predicting)
    assert values.tolist() == [0] * len(values)
    values.sum().backward()
    assert model.lm.score.weight.grad.abs().sum() > 0


def test_a_folder_that_is_not_a_reward_model_is_refused(causal: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a sequence classifier"):
        load(causal)
    with pytest.raises(ConfigError, match="learner.critic.path .* is not a model folder"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="a classifier with 3 labels; give one with num_labels 1"):
        load(make_tiny_classifier(tmp_path / "three", seed=1, num_labels=3))


def test_another_tokenizer_is_refused(causal: Path, classifier: Path, tmp_path: Path) -> None:
    check_tokenizer(classifier, causal, "learner.reward_model.path")
    other = tmp_path / "other"
    shutil.copytree(classifier, other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"w2": 2', '"w3": 2').replace('"w3": 3', '"w2": 3'))
    with pytest.raises(ConfigError, match="has another tokenizer than model.path"):
        check_tokenizer(other, causal, "learner.reward_model.path")
    (other / "tokenizer.json").unlink()
    check_tokenizer(other, causal, "learner.reward_model.path")
