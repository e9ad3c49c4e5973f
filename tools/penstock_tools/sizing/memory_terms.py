"""Parts of the learner's memory: the settings that determine it, terms with formulas, and sizes of activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.config.run import RunConfig
from penstock_tools.sizing.models import ModelShape

Role = Literal["policy", "reference", "critic", "reward_model"]
Phase = Literal["load", "step", "gather", "push"]
PHASES: tuple[Phase, ...] = ("load", "step", "gather", "push")

EAGER_LOGIT_BYTES = 19
"""Bytes for each logit of a chunk if the log-probs are not compiled: the logit in 16 bits, four float32 results of the
operations on it, and a mask of 1 byte. Without a gradient there is no mask."""
COMPILED_LOGIT_BYTES = 4
"""The same if the log-probs are compiled: the logit and its gradient in 16 bits."""
REDUCED_BYTES = 4
"""Gradients are reduced in float32."""
CHECKED_TOKENS = 158
"""Tokens that the self-check of a model without windows runs at once."""
READ_BYTES = 2**26
"""A rank reads its weights in pieces, and has at most this much of the files in host memory."""
CONTEXT = "context"
STAGED = "versions staged for pushes"
STAGED_VERSIONS = 2
"""Versions on rank 0: the current one and the newest. A third is there while a push takes longer than a step."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Term:
    """One part of a rank's memory, with the formula for its size."""

    name: str
    formula: str
    num_bytes: float


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one moment, on its GPU and on the host."""

    phase: Phase
    what: str
    device: tuple[Term, ...]
    host: tuple[Term, ...] = ()


@dataclass(frozen=True)
class Setup:
    """The settings of the learner that its memory depends on. The defaults are those of the config with `model.dtype`
    bfloat16."""

    micro_batch_tokens: int = 16384
    logprob_chunk_tokens: int = 2048
    master_bytes: int = 4
    """Bytes of a trained weight, its gradient, and each of Adam's two numbers."""
    compute_bytes: int = 2
    """Bytes of a number in forward and backward passes."""
    pushed_bytes: int = 2
    """Bytes of a weight in the engine, and of a frozen weight in the reference and the reward model."""
    recomputed: float = 1.0
    """Share of the layers that are recomputed in the backward pass."""
    compiles: bool = False
    kept: float = 1.0
    """With `compiles`: share of activations that layers keep if they are not recomputed."""
    cpu_offload: bool = False
    lora_rank: int = 0
    """Rank of the policy's adapter, which is trained instead of its weights. 0: no adapter."""
    policy_is_reference: bool = True
    """With an adapter: whether the policy, with its adapter switched off, is the reference."""
    reference_bits: int = 0
    """Bits of a weight of a quantized reference, which every rank loads whole. 0: it is not quantized."""
    staging: Literal["device", "host"] = "device"
    is_padded: bool = False
    """The model takes the padded path (docs/models.md), which holds all logits of a micro-batch. Padding is extra."""
    keeps_gathered: bool = False
    """Layers stay gathered between the forward and the backward pass, as they do on a CPU."""
    num_micro_batches: int = 2
    """Micro-batches of a step. From the second on, gradients are in memory during the forward pass."""

    @classmethod
    def of(cls, config: RunConfig, role: str = "policy") -> Setup:
        """The settings of a role of a run's configuration, on GPUs."""
        learner = config.learner
        pushed_bytes = _BYTES[config.model.dtype]
        wanted = learner.compute_dtype
        return cls(
            micro_batch_tokens=tokens_of_a_rank(
                learner.micro_batch_tokens, config.rollout.engine.max_model_len, learner.sequence_parallel, role
            ),
            logprob_chunk_tokens=learner.logprob_chunk_tokens,
            master_bytes=_BYTES[learner.master_dtype],
            compute_bytes=(4 if config.model.dtype == "float32" else 2) if wanted == "auto" else _BYTES[wanted],
            pushed_bytes=pushed_bytes,
            recomputed=learner.activation_checkpointing,
            compiles=learner.compile,
            kept=learner.activation_memory,
            cpu_offload=learner.cpu_offload,
            lora_rank=learner.lora.rank if learner.lora else 0,
            policy_is_reference=learner.policy_is_reference,
            staging="host" if config.weights.staging == "host" else "device",
        )


def tokens_of_a_rank(micro_batch_tokens: int, longest_sequence: int, sequence_parallel: int, role: str) -> int:
    """The most tokens that a rank has in a pass. A sequence is never split over micro-batches, so the longest one may
    be more than `micro_batch_tokens`. Only the policy splits it over ranks."""
    num_sharing = sequence_parallel if role == "policy" else 1
    return max(micro_batch_tokens, -(-longest_sequence // num_sharing))


def total(terms: Sequence[Term]) -> float:
    return sum(term.num_bytes for term in terms)


def peak(moments: Sequence[Moment], phase: Phase | None = None) -> Moment:
    """The moment of a phase, or of all, at which the GPU is fullest."""
    return max((moment for moment in moments if phase in (None, moment.phase)), key=lambda m: total(m.device))


def logits_term(model: ModelShape, setup: Setup, bytes_each: int) -> Term:
    """Logits are computed for some tokens, or for some of the vocabulary, at a time."""
    chunk = min(setup.logprob_chunk_tokens, setup.micro_batch_tokens)
    bytes_each = bytes_each * setup.compute_bytes // 2 if bytes_each == COMPILED_LOGIT_BYTES else bytes_each
    formula = f"{chunk} x {model.vocabulary_size} x {bytes_each} B"
    return Term("logits of a chunk", formula, float(bytes_each * chunk * model.vocabulary_size))


def whole_logits(model: ModelShape, setup: Setup, num_copies: int) -> list[Term]:
    """All logits of a micro-batch, which only the padded path has: as the model returns them and those of the response
    tokens and, in a step, the gradients of both."""
    if not setup.is_padded:
        return []
    tokens, size = setup.micro_batch_tokens, setup.compute_bytes
    formula = f"{tokens} x {model.vocabulary_size} x {size} B x {num_copies}"
    return [Term("logits of the micro-batch", formula, float(num_copies * size * tokens * model.vocabulary_size))]


def checked_logits(model: ModelShape, setup: Setup) -> Term:
    """Logits of the tokens that the self-check compares. Models with windows compare more of them."""
    few = replace(setup, micro_batch_tokens=CHECKED_TOKENS, compiles=False)
    return logits_term(model, few, EAGER_LOGIT_BYTES - 1)


def layer_width(model: ModelShape, *, compiles: bool) -> int:
    """Numbers per token that a layer keeps for its backward pass: norms, attention, and the feed-forward network.

    Compiled layers fuse the norms and the gate, and keep less. Each expert gets copies of its tokens."""
    copies = 2 * model.experts.per_token * model.hidden_size if model.experts else 0
    norms, gates = (4, 3) if compiles else (8, 4)
    return norms * model.hidden_size + model.attention_size + gates * model.active_intermediate_size + copies


def kept_width(model: ModelShape, setup: Setup) -> int:
    """Numbers per token that a layer keeps if it is not recomputed."""
    share = setup.kept if setup.compiles else 1.0
    return round(share * layer_width(model, compiles=setup.compiles))


def adapter_parameters(model: ModelShape, rank: int) -> int:
    """Parameters of a LoRA adapter for the attention and the feed-forward network of every layer. Experts get none."""
    hidden, keys = model.hidden_size, model.num_kv_heads * model.head_size
    queries = model.num_heads * model.head_size
    attention = 2 * (hidden + queries) + 2 * (hidden + keys)
    inner = model.experts.shared_size if model.experts else model.intermediate_size
    return model.num_layers * rank * (attention + (3 * (hidden + inner) if inner else 0))


def reading() -> Term:
    """What a rank has of the files in host memory while it reads its weights."""
    return Term("pieces of the files", "", READ_BYTES)
