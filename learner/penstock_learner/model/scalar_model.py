"""Hugging Face backbones with one number as output: the models of the critic and of the reward model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.learner import JudgeConfig
from penstock.errors import ConfigError
from penstock_learner.model import attention
from penstock_learner.model.backbone import ModelInputs, hidden_states
from penstock_learner.model.causal_lm import load_model


class PackedScalarModel(nn.Module):
    """Wraps a sequence classifier so that the sharded root covers embedding, layers and head in one forward pass."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm: Any = lm

    def forward(self, inputs: ModelInputs, positions: Tensor) -> Tensor:
        """The head's number at each of these positions of the packed tokens."""
        hidden = hidden_states(self.lm, inputs.token_ids, inputs.packing.columns, inputs.packing)
        return self._numbers(hidden[positions])

    def _numbers(self, hidden: Tensor) -> Tensor:
        numbers: Tensor = self.lm.score(hidden)
        return numbers.float().sum(dim=1)  # sums one column: FSDP's root must not return a view


class PackedJudge(PackedScalarModel):
    """A causal model whose number is the probability of `yes` against `no` as the next token."""

    def __init__(self, lm: nn.Module, yes_id: int, no_id: int) -> None:
        super().__init__(lm)
        self.yes_id = yes_id
        self.no_id = no_id

    def _numbers(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm.lm_head(hidden).float()
        return torch.sigmoid(logits[:, self.yes_id] - logits[:, self.no_id])


def load_scalar_model(path: Path, dtype: torch.dtype, *, key: str, make_head: bool) -> PackedScalarModel:
    """Load a Hugging Face folder with packed attention. Never reaches the network. Errors name the config's `key`.

    The folder must hold a sequence classifier with one label. With `make_head` it may hold any other decoder, which
    gets a head of zeros. Zeros are the same on every rank."""
    has_head = _has_head(path, key)
    if not has_head and not make_head:
        raise ConfigError(
            f"{key} {path} is not a sequence classifier; give a folder whose config.json names one, with one label"
        )
    from transformers import AutoModelForSequenceClassification

    attention.register()
    lm: Any = AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True
    )
    if not hasattr(lm, "score") or not hasattr(lm.model, "layers"):
        raise ConfigError(f"{key} {path} has no backbone with layers and a head `score`; give a decoder-only model")
    if not has_head:
        nn.init.zeros_(lm.score.weight)
    return PackedScalarModel(lm)


def load_judge(path: Path, dtype: torch.dtype, config: JudgeConfig, key: str) -> tuple[PackedJudge, list[int]]:
    """Load a causal model as a judge. Also returns the tokens of the question that the judge answers."""
    from transformers import AutoTokenizer

    lm = load_model(path, dtype, chunk_tokens=1).lm
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)

    def ids_of(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    answers = [ids_of(text) for text in (config.yes, config.no)]
    if any(len(ids) != 1 for ids in answers) or answers[0] == answers[1]:
        raise ConfigError(f"{key}: yes {config.yes!r} and no {config.no!r} must be two different tokens of {path}")
    return PackedJudge(lm, answers[0][0], answers[1][0]), ids_of(config.question)


def check_tokenizer(path: Path, policy_path: Path, key: str) -> None:
    """Raise ConfigError if the folder's vocabulary differs from the policy's: the same ids would mean other text.

    A folder without a `tokenizer.json` passes."""
    own, wanted = (_vocabulary(folder) for folder in (path, policy_path))
    if own is not None and wanted is not None and own != wanted:
        raise ConfigError(
            f"{key} {path} has another tokenizer than model.path {policy_path}; give one of the same family"
        )


def _has_head(path: Path, key: str) -> bool:
    if not (path / "config.json").is_file():
        raise ConfigError(f"{key} {path} is not a model folder (no config.json); give a Hugging Face checkpoint")
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    is_classifier = any("SequenceClassification" in name for name in config.architectures or ())
    if is_classifier and config.num_labels != 1:
        raise ConfigError(f"{key} {path} is a classifier with {config.num_labels} labels; give one with num_labels 1")
    return is_classifier


def _vocabulary(path: Path) -> Any:
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    described = json.loads(file.read_text())
    return described.get("model", {}).get("vocab"), described.get("added_tokens")
