"""Compares a model's own path with Hugging Face's plain forward of the same weights, before anything is trained.

The sequences are random tokens, longer than every window and every length at which the model changes, and they share
one forward pass. The plain forward takes them one at a time. The largest difference of any token counts. What rounding
allows is measured between two plain attention implementations. A second pass with other last tokens shows whether
earlier tokens see them: such a model would be given the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import ConfigError, first_line_of
from penstock_learner.batches.sequence_batch import SequenceBatch, unsampled_batch
from penstock_learner.model.architectures import depends_on_length
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.attention.sequence_parallel import SequenceParallel
from penstock_learner.model.causal_lm import CausalLM
from penstock_learner.model.scalar_model import JudgeModel, ScalarModel

_MARGIN = 4.0
"""The path may differ this many times as much as two plain forwards do."""
_LIMITS = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.1, 1.0), torch.float16: (0.02, 0.2)}
"""Least and most that may be allowed, by the compute type. Some plain attention implementations skip a part of a
model's attention, so two of them can differ by more than rounding."""
LIMITS = (
    "sliding_window", "sliding_window_size", "attention_chunk_size", "window_size", "attention_window_size",
    "keep_window_size", "local_attention", "index_topk", "indexer_budget",
)  # fmt: skip
"""Names of the lengths at which configurations say that attention changes."""
_SHORT = (5, 33, 48)
"""Lengths of the sequences besides the longest."""
_EXCESS = 24
"""The longest sequence has this many tokens more than every window."""


@dataclass(frozen=True)
class SelfCheck:
    """The outcome of a comparison. Differences are in nats for a causal model, else relative to the values' spread."""

    is_packed: bool
    error: float
    """The largest difference of any token."""
    limit: float
    """The largest difference that rounding explains."""
    longest: int
    """Tokens of the longest sequence."""
    leak: float
    """The largest change of any token's number after a later token was replaced. It is rounding in a causal model."""

    @property
    def ok(self) -> bool:
        return self.is_equal and self.is_causal

    @property
    def is_equal(self) -> bool:
        return self.error <= self.limit  # false for NaN

    @property
    def is_causal(self) -> bool:
        return self.leak <= self.limit


def require_right(
    model: CausalLM | ScalarModel, key: str, device: torch.device, dtype: torch.dtype,
    parallel: SequenceParallel | None = None,
) -> None:  # fmt: skip
    """Raise ConfigError, with the numbers, if the model's path is wrong. With `parallel` its ranks share the sequences.
    Collective where the model is sharded."""
    check = compare_with_plain(model, key, device, dtype, parallel)
    if not check.is_equal:
        raise ConfigError(
            f"{key}: {model.lm.config.model_type} on the {'packed' if check.is_packed else 'padded'} path differs from "
            f"Hugging Face's own forward by {check.error:.3g} at one token (at most {check.limit:.3g} is rounding, "
            f"sequences up to {check.longest} tokens); it would be trained incorrectly, so use another model"
        )
    if not check.is_causal:
        raise ConfigError(
            f"{key}: tokens of {model.lm.config.model_type} see the tokens after them (replacing the last one changes "
            f"an earlier one by {check.leak:.3g}, at most {check.limit:.3g} is rounding); use a causal model"
        )


def compare_with_plain(
    model: CausalLM | ScalarModel, key: str, device: torch.device, dtype: torch.dtype,
    parallel: SequenceParallel | None = None,
) -> SelfCheck:  # fmt: skip
    """Compare the model's path with the plain forward. Collective where the model is sharded. Raises ConfigError if the
    model cannot run at all, or runs out of memory."""
    vocabulary: int = model.lm.config.get_text_config().vocab_size
    lengths = np.array(_lengths(model.lm.config), dtype=np.int64)
    token_ids = np.random.default_rng(0).integers(0, vocabulary, lengths.sum())
    batch = unsampled_batch(token_ids, lengths, np.ones_like(lengths), np.arange(len(lengths)))  # prompts of one token
    run = _runner(model, device, parallel)
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            own = run(batch, False)
            changed = run(_with_other_last_tokens(batch, vocabulary), False)
            plain = []
            for name in ("eager", *(["sdpa"] if model.lm._supports_sdpa else [])):
                with _plain(model.lm, name):
                    each = (run(batch.select([index]), True) for index in range(batch.num_sequences))
                    plain.append(torch.cat(list(each)))
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError, RuntimeError) as error:
        first_line = first_line_of(error)
        # torch has no separate type for host memory.
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise ConfigError(
                f"{key}: {device} is out of memory in the first forward pass ({first_line}); use more ranks or "
                "larger devices, or set learner.offload to all, and `offload` of a frozen role to true"
            ) from error
        raise ConfigError(
            f"{key}: a model of type {model.lm.config.model_type} cannot be run: {first_line}; use another model"
        ) from error
    spread = 1.0 if isinstance(model, CausalLM) else float(plain[0].std()) or 1.0
    noise = max(float((other - plain[0]).abs().max()) for other in plain)
    difference = float((own - plain[0]).abs().max())
    least, most = _LIMITS[dtype]
    # With one plain implementation there is nothing to measure rounding by.
    limit = most if len(plain) == 1 else min(max(least, _MARGIN * noise / spread), most)
    # A causal model has one number for each token but the first, the others one for each token.
    last = np.cumsum(batch.lengths - 1 if isinstance(model, CausalLM) else batch.lengths) - 1
    earlier = torch.as_tensor(np.delete(np.arange(len(own)), last), device=own.device)
    leak = float((own - changed)[earlier].abs().max())
    return SelfCheck(model.path.is_packed, difference / spread, limit, int(batch.lengths.max()), leak / spread)


def _runner(
    model: CausalLM | ScalarModel, device: torch.device, parallel: SequenceParallel | None
) -> Callable[[SequenceBatch, bool], Tensor]:
    """Runs a batch on the model's own path, or, if the second argument is true, through Hugging Face's forward."""
    with_head = isinstance(model, JudgeModel)

    def run(batch: SequenceBatch, padded: bool) -> Tensor:
        inputs = ModelInputs.of(batch, device, None if padded else parallel)
        if isinstance(model, CausalLM):
            log_probs: Tensor = model(inputs, padded=padded)[0]
            return log_probs.float()
        everywhere = torch.arange(len(batch.token_ids), device=device)
        # A critic's new head is zero everywhere, so its hidden states are compared.
        values: Tensor = model(inputs, everywhere, padded=padded, with_head=with_head)
        return values.float()

    return run


@contextmanager
def _plain(lm: Any, attention: str) -> Iterator[None]:
    """Inside, transformers computes experts, and attention in one of its ways."""
    before, experts = lm.config._attn_implementation, lm.get_experts_implementation()
    lm.set_attn_implementation({"": attention, "text_config": attention})
    lm.set_experts_implementation(None)
    try:
        yield
    finally:
        lm.set_attn_implementation({"": before, "text_config": before})
        lm.set_experts_implementation(experts)


def _lengths(config: Any) -> list[int]:
    """Tokens of each sequence. None is longer than the model allows."""
    text = config.get_text_config()
    limits = [getattr(text, name, None) for name in LIMITS]
    limits.append((getattr(text, "index_block_size", 0) or 0) * (getattr(text, "index_topk_blocks", 0) or 0))
    if depends_on_length(config):
        name = "original_max_position_embeddings"
        limits += [getattr(text, name, None), (getattr(text, "rope_parameters", None) or {}).get(name)]
    allowed = getattr(text, "max_position_embeddings", None) or 1 << 20
    wanted = [limit + _EXCESS for limit in limits if isinstance(limit, int) and limit + _EXCESS <= allowed]
    return [min(length, allowed) for length in (*_SHORT, max(wanted, default=_SHORT[-1] + _EXCESS))]


def _with_other_last_tokens(batch: SequenceBatch, vocabulary: int) -> SequenceBatch:
    token_ids = batch.token_ids.copy()
    last = np.cumsum(batch.lengths) - 1
    token_ids[last] = (token_ids[last] + 1) % vocabulary
    return replace(batch, token_ids=token_ids)
