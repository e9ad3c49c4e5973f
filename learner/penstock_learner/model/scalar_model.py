"""Hugging Face backbones with one number as output: the models of the critic and of the reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.learner import JudgeConfig
from penstock.errors import ConfigError
from penstock.machine import collecting_rarely
from penstock.weights.folder_tensors import read_json
from penstock_learner.model.architectures import ModelPath, decoder_of, is_composite, logit_form_of
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.causal_lm import hidden_at, of_all_ranks, open_model, open_on_path, padded_inputs
from penstock_learner.model.loading import FolderModel, decoder_layers


class ScalarModel(FolderModel):
    """A sequence classifier."""

    def forward(
        self, inputs: ModelInputs, positions: Tensor, *, padded: bool = False, with_head: bool = True
    ) -> Tensor:
        """The head's number at each of these positions of the packed tokens, or without the head, the hidden states.
        `padded` asks for Hugging Face's own forward also of a model on the packed path."""
        if padded or not self.path.is_packed:
            packing = inputs.packing
            row, column = packing.rows[positions], packing.columns[positions]
            return self._forward_padded(padded_inputs(inputs), row, column, with_head=with_head)
        hidden, mine = hidden_at(self.lm, inputs, positions)
        own = self._numbers(hidden) if with_head else hidden
        return of_all_ranks(own, mine, positions, inputs.packing)

    def _forward_padded(self, rows: dict[str, Any], row: Tensor, column: Tensor, *, with_head: bool) -> Tensor:
        backbone = decoder_of(self.lm) if is_composite(self.lm.config) else self.lm.base_model
        hidden: Tensor = backbone(**rows).last_hidden_state[row, column]
        return self._numbers(hidden) if with_head else hidden

    def _numbers(self, hidden: Tensor) -> Tensor:
        numbers: Tensor = self.lm.score(hidden)
        return numbers.float().sum(dim=1)  # sums one column: FSDP's root must not return a view


class JudgeModel(ScalarModel):
    """A causal model whose number is the probability of `yes` against `no` as the next token."""

    def __init__(self, lm: nn.Module, path: ModelPath, yes_id: int, no_id: int) -> None:
        super().__init__(lm, path)
        self.yes_id = yes_id
        self.no_id = no_id
        self.logit_form = logit_form_of(self.lm.config)

    def _forward_padded(self, rows: dict[str, Any], row: Tensor, column: Tensor, *, with_head: bool) -> Tensor:
        return self._preference(self.lm(**rows).logits[row, column].float())

    def _numbers(self, hidden: Tensor) -> Tensor:
        return self._preference(self.logit_form.apply(self.lm.get_output_embeddings()(hidden).float()))

    def _preference(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits[:, self.yes_id] - logits[:, self.no_id])


def open_scalar_model(path: Path, dtype: torch.dtype, *, key: str, make_head: bool) -> ScalarModel:
    """Make the model of a Hugging Face folder on the path that its architecture takes. Never reaches the network. It is
    on the meta device until `read_weights`. Errors name the config's `key`. The folder must hold a sequence classifier
    with one label, or with `make_head` any decoder, which gets a head of zeros, the same on every rank."""
    has_head = _has_head(path, key)
    if not has_head and not make_head:
        raise ConfigError(
            f"{key} {path} is not a sequence classifier; give a folder whose config.json names one, with one label"
        )
    with collecting_rarely():
        from transformers import AutoModelForSequenceClassification

    new_head = "" if has_head else "score."
    lm, model_path, unread = open_on_path(
        AutoModelForSequenceClassification, path, key, dtype, new_head=new_head, num_labels=1
    )
    if not hasattr(lm, "score"):
        raise ConfigError(f"{key} {path} has no backbone with layers and a head `score`; give a decoder-only model")
    decoder_layers(lm)
    if not has_head and unread is None:
        nn.init.zeros_(lm.score.weight)
    model = ScalarModel(lm, model_path)
    model.unread = unread
    return model


def open_judge(path: Path, dtype: torch.dtype, config: JudgeConfig, key: str) -> tuple[JudgeModel, list[int]]:
    """Make a causal model as a judge, on the meta device until `read_weights`, and the tokens of the question that it
    answers. Errors name parts of the config's `key`."""
    from transformers import AutoTokenizer

    model = open_model(path, dtype, chunk_tokens=1, key=f"{key}.path")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)

    def ids_of(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    answers = [ids_of(text) for text in (config.yes, config.no)]
    if any(len(ids) != 1 for ids in answers) or answers[0] == answers[1]:
        raise ConfigError(
            f"{key}.judge: yes {config.yes!r} and no {config.no!r} must be two different tokens of {path}"
        )
    judge = JudgeModel(model.lm, model.path, answers[0][0], answers[1][0])
    judge.unread = model.unread
    return judge, ids_of(config.question)


def check_tokenizer(path: Path, policy_path: Path, key: str) -> None:
    """Raise ConfigError if the folder has a vocabulary that differs from the policy's: ids would mean other text."""
    own, wanted = (_vocabulary(folder) for folder in (path, policy_path))
    if own is not None and wanted is not None and own != wanted:
        raise ConfigError(
            f"{key} {path} has another tokenizer than model.path {policy_path}; give one of the same family, or for a "
            "reward model set tokenizer to own"
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
    described = read_json(path / "tokenizer.json")
    return (described.get("model", {}).get("vocab"), described.get("added_tokens")) if described else None
