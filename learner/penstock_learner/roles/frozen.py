"""The frozen roles, which compute forward passes and never change: the reference and the reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock_learner.batches.partition import RankShard
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.causal_lm import CausalLM, forward_log_probs, open_model
from penstock_learner.model.loading import host_policy, is_quantized, read_weights, shard
from penstock_learner.model.scalar_model import ScalarModel, check_tokenizer, open_judge, open_scalar_model
from penstock_learner.model.self_check import require_right
from penstock_learner.roles.dispatch import dispatched
from penstock_learner.roles.rank import Rank


class FrozenRank(Rank):
    """A rank whose model computes forward passes and never changes."""

    def freeze(self, model: CausalLM | ScalarModel, key: str) -> None:
        """Shard the model over the role's ranks, read this rank's weights, and check its forward pass. Raises
        ConfigError if weights that cannot be offloaded are to be."""
        self.require_parallel(model)
        model.requires_grad_(False)
        offload: bool = self.settings.offload
        if offload and is_quantized(model):
            raise ConfigError(
                f"{key.removesuffix('.path')}: quantized weights cannot be offloaded; set offload to false"
            )
        if self.world_size > 1 or offload:
            shard(model, offload=host_policy(offload, is_cuda=self.device.type == "cuda"))
        read_weights(model, self.device, offload=offload)
        require_right(model, key, self.device, self.model_dtype, self.parallel)


class ReferenceWorker(FrozenRank):
    """One rank of the reference. Holds the initial weights, or those of the role's own path, and never changes them."""

    role = "reference"

    def load(self) -> None:
        path, key = self.config.model.path, "model.path"
        if self.settings.path is not None:
            path, key = self.settings.path, self.path_key
            check_tokenizer(path, self.config.model.path, key)
        self.model = open_model(path, self.model_dtype, self.config.learner.logprob_chunk_tokens, key=key)
        self.freeze(self.model, key)

    @dispatched(join="tokens")
    def log_probs(self, part: RankShard) -> NDArray[np.float32]:
        """[T] log-probs of this rank's micro-batches, concatenated."""
        self.crash_point()
        return forward_log_probs(self.model, part, self.device, self.parallel)


class RewardModelWorker(FrozenRank):
    """One rank of the reward model. Holds the classifier or judge and never changes it."""

    role = "reward_model"

    def load(self) -> None:
        config, key = self.settings, self.path_key
        self.retokenize: Callable[[SequenceBatch], SequenceBatch] = lambda batch: batch
        if config.tokenizer == "own":
            self.retokenize = Retokenization(self.config.model.path, config.path, key)
        else:
            check_tokenizer(config.path, self.config.model.path, key)
        self.question: list[int] = []
        if config.judge is None:
            self.model: ScalarModel = open_scalar_model(config.path, self.model_dtype, key=key, make_head=False)
        else:
            self.model, self.question = open_judge(
                config.path, self.model_dtype, config.judge, key.removesuffix(".path")
            )
        self.freeze(self.model, key)

    @dispatched(join="sequences")
    def scores(self, part: RankShard) -> NDArray[np.float32]:
        """[S] one score for each sequence of this rank's micro-batches: the model's output at its last token. For a
        judge, the question is appended first."""
        self.crash_point()
        results = []
        with torch.no_grad():
            for micro in part.micro_batches:
                asked = followed_by(self.retokenize(micro), self.question)
                last = torch.as_tensor(np.cumsum(asked.lengths) - 1, device=self.device)
                results.append(self.model(ModelInputs.of(asked, self.device, self.parallel), last).cpu().numpy())
        joined: NDArray[np.float32] = np.concatenate(results)
        return joined


def followed_by(batch: SequenceBatch, token_ids: Sequence[int]) -> SequenceBatch:
    """Append these tokens to each sequence. Use the result for forward passes only: the [T] arrays do not change."""
    ends = np.repeat(np.cumsum(batch.lengths), len(token_ids))
    extended = np.insert(batch.token_ids, ends, np.tile(np.asarray(token_ids, dtype=np.int64), batch.num_sequences))
    return replace(batch, token_ids=extended, lengths=batch.lengths + len(token_ids))


_MARK = "PENSTOCK_QUESTION"


class Retokenization:
    """Translates sequences of the policy's tokens into those of another model, by way of their text. The prompt becomes
    the user's message and the response the assistant's, in the other model's chat template. The message is found by the
    policy's own template; a prompt of several messages is given whole, as that has rendered it. A model without a
    template reads plain text."""

    def __init__(self, policy_path: Path, own_path: Path, key: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._policy: Any = AutoTokenizer.from_pretrained(policy_path, local_files_only=True)
            self._own: Any = AutoTokenizer.from_pretrained(own_path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key} {own_path} or model.path has no usable tokenizer: {error}") from error
        self._has_template = bool(getattr(self._own, "chat_template", None))
        self._before, self._after = self._around_question()

    def __call__(self, batch: SequenceBatch) -> SequenceBatch:
        """The same sequences in the other model's tokens, for forward passes only: the [T] arrays do not change."""
        sequences = np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1])
        encoded = [
            self._encode(ids[:prompt_length].tolist(), ids[prompt_length:].tolist())
            for ids, prompt_length in zip(sequences, batch.prompt_lengths, strict=True)
        ]
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        return replace(
            batch, token_ids=np.concatenate(encoded), lengths=lengths, prompt_lengths=lengths - 1, routed_experts=None
        )

    def text(self, prompt: list[int], response: list[int]) -> str:
        answer = self._policy.decode(response, skip_special_tokens=True)
        if not self._has_template:
            return f"{self._policy.decode(prompt, skip_special_tokens=True)}{answer}"
        question = self._policy.decode(prompt, skip_special_tokens=False)
        if self._before and question.startswith(self._before) and question.endswith(self._after):
            question = question[len(self._before) : len(question) - len(self._after)]
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text: str = self._own.apply_chat_template(chat, tokenize=False)
        return text

    def _encode(self, prompt: list[int], response: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        ids = self._own(self.text(prompt, response), add_special_tokens=not self._has_template)["input_ids"]
        return np.asarray(ids, dtype=np.int64)

    def _around_question(self) -> tuple[str, str]:
        """What the policy's template puts before and after the only message of a user."""
        if not getattr(self._policy, "chat_template", None):
            return "", ""
        chat = [{"role": "user", "content": _MARK}]
        rendered = self._policy.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        before, _, after = rendered.partition(_MARK)
        return before, after
