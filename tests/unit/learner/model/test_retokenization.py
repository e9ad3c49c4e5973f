"""A reward model with another tokenizer reads the text of a sample in its own chat template."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from penstock.errors import ConfigError
from penstock_learner.batches.sequence_batch import batch_of
from penstock_learner.roles.frozen import Retokenization
from support.groups import make_group
from support.scripted_engines import CHATML, END, PLAIN, make_tokenizer_folder, spelled


def test_the_text_of_each_sequence_is_read_in_the_other_models_template(tmp_path: Path) -> None:
    policy, own = make_tokenizer_folder(tmp_path / "policy", CHATML), make_tokenizer_folder(tmp_path / "own", PLAIN)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    chat = [{"role": "user", "content": "abc"}]
    prompt = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))["input_ids"]
    retokenize = Retokenization(policy, own, "learner.reward_model.path")
    response = [*spelled("abcab"), END]
    text = retokenize.text(prompt, response)
    assert "abc" in text and "abcab" in text and "<|start|>" not in text, "the policy's markers are gone"
    group = make_group(1)
    first = replace(
        group.trajectories[0], token_ids=np.array(response, np.int32), loss_mask=np.ones(len(response), np.uint8),
        log_probs=np.zeros(len(response), np.float32), segments=group.trajectories[0].segments[:1],
    )  # fmt: skip
    first = replace(first, segments=(replace(first.segments[0], start=0, end=len(response)),))
    batch = batch_of([replace(group, prompt_token_ids=np.array(prompt, np.int32), trajectories=(first, first))])
    read = retokenize(batch)
    wanted = AutoTokenizer.from_pretrained(own)(text, add_special_tokens=False)["input_ids"]
    assert read.token_ids.tolist() == wanted * 2 and read.lengths.tolist() == [len(wanted)] * 2
    assert len(wanted) < len(prompt) + len(response), "the sampled ids were spelled out"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        Retokenization(make_tokenizer_folder(tmp_path / "policy"), tmp_path, "learner.reward_model.path")
