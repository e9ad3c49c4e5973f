"""Memory that each role needs on one GPU, term by term."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.sizing.hardware import CONTEXT_BYTES, Gpu
from penstock.sizing.models import ModelShape

LOGIT_COPIES = 3
"""Copies of the logits in memory at once, in float32: logits, log-probs, and a gradient."""


@dataclass(frozen=True)
class Term:
    """One part of a GPU's memory, with the formula for its size."""

    name: str
    formula: str
    num_bytes: float


@dataclass(frozen=True)
class Batch:
    """The limits that determine the size of activations."""

    micro_batch_tokens: int = 16384
    logprob_chunk_tokens: int = 2048


def total(terms: list[Term]) -> float:
    return sum(term.num_bytes for term in terms)


def policy_terms(model: ModelShape, num_ranks: int, batch: Batch, *, stages_on_gpu: bool) -> list[Term]:
    """Memory of the policy's rank 0, which needs the most: it also holds the versions that are being pushed."""
    terms = [*_trained(model, num_ranks, batch), _logits(model, batch, LOGIT_COPIES)]
    if stages_on_gpu:
        count = _count(model.num_parameters)
        terms.append(Term("two versions staged for the push", f"{count} x 2 B x 2", 4 * model.num_parameters))
    return [*terms, Term("context", "", CONTEXT_BYTES)]


def critic_terms(model: ModelShape, num_ranks: int, batch: Batch) -> list[Term]:
    """Memory of a critic rank. It is trained like the policy but has no logits, and nothing is pushed."""
    return [*_trained(model, num_ranks, batch), Term("context", "", CONTEXT_BYTES)]


def reference_terms(model: ModelShape, num_ranks: int, batch: Batch) -> list[Term]:
    """Memory of a reference rank: 16-bit weights and the activations of a forward pass."""
    return [*_frozen(model, num_ranks, batch), _logits(model, batch, 2), Term("context", "", CONTEXT_BYTES)]


def reward_model_terms(model: ModelShape, num_ranks: int, batch: Batch) -> list[Term]:
    return [*_frozen(model, num_ranks, batch), Term("context", "", CONTEXT_BYTES)]


def _trained(model: ModelShape, num_ranks: int, batch: Batch) -> list[Term]:
    size, count = model.num_parameters, _count(model.num_parameters)
    return [
        Term("weights", f"{count} x 4 B / {num_ranks}", 4 * size / num_ranks),
        Term("gradients", f"{count} x 4 B / {num_ranks}", 4 * size / num_ranks),
        Term("Adam", f"{count} x 8 B / {num_ranks}", 8 * size / num_ranks),
        *_whole_layers(model, num_ranks),
        Term(
            "gradients of a layer before they are reduced",
            f"{_count(model.layer_parameters)} x 4 B",
            4 * model.layer_parameters if num_ranks > 1 else 0,
        ),
        *_activations(model, batch, is_trained=True),
    ]


def _frozen(model: ModelShape, num_ranks: int, batch: Batch) -> list[Term]:
    size, count = model.num_parameters, _count(model.num_parameters)
    return [
        Term("weights", f"{count} x 2 B / {num_ranks}", 2 * size / num_ranks),
        *(_whole_layers(model, num_ranks) if num_ranks > 1 else []),
        *_activations(model, batch, is_trained=False),
    ]


def server_terms(model: ModelShape, tensor_parallel: int, gpu: Gpu, utilisation: float) -> list[Term]:
    """Memory of one GPU of a rollout server. The KV cache gets what weights and activations leave."""
    count = _count(model.num_parameters)
    fixed = [
        Term("weights", f"{count} x 2 B / {tensor_parallel}", 2 * model.num_parameters / tensor_parallel),
        Term("activations and graphs", "", CONTEXT_BYTES),
    ]
    cache = max(0.0, gpu.memory_bytes * utilisation - total(fixed))
    return [*fixed, Term("KV cache", f"{gpu.memory_bytes / 1e9:.0f} GB x {utilisation:g} - the above", cache)]


def _whole_layers(model: ModelShape, num_ranks: int) -> list[Term]:
    """16-bit weights that FSDP gathers at one time: two layers, the embedding and the head."""
    if num_ranks == 1:
        return [Term("weights in 16 bits", f"{_count(model.num_parameters)} x 2 B", 2 * model.num_parameters)]
    return [
        Term("two gathered layers", f"2 x {_count(model.layer_parameters)} x 2 B", 4 * model.layer_parameters),
        Term("gathered embedding and head", f"{_count(model.root_parameters)} x 2 B", 2 * model.root_parameters),
    ]


def _activations(model: ModelShape, batch: Batch, *, is_trained: bool) -> list[Term]:
    """Activations if every layer is recomputed in the backward pass: the input of each layer, and the activations
    inside one layer."""
    tokens, hidden, inner = batch.micro_batch_tokens, model.hidden_size, model.intermediate_size
    inputs = Term(
        "inputs of the layers",
        f"{tokens} tokens x {hidden} x {model.num_layers} x 2 B",
        2.0 * tokens * hidden * model.num_layers,
    )
    inside = Term(
        "inside one layer",
        f"{tokens} tokens x (8 x {hidden} + 4 x {inner}) x 2 B",
        2.0 * tokens * (8 * hidden + 4 * inner),
    )
    return [*([inputs] if is_trained else []), inside]


def _logits(model: ModelShape, batch: Batch, copies: int) -> Term:
    chunk, vocabulary = batch.logprob_chunk_tokens, model.vocabulary_size
    formula = f"{chunk} tokens x {vocabulary} x 4 B x {copies}"
    return Term("logits of a chunk", formula, 4.0 * copies * chunk * vocabulary)


def _count(num_parameters: int) -> str:
    return f"{num_parameters / 1e9:.2f}e9"
