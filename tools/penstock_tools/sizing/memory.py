"""Memory that a rank of each role needs, term by term, at the moments when it needs the most.

| phase  | moments                                                                            |
|--------|------------------------------------------------------------------------------------|
| load   | the rank's weights are read; the root is gathered; the self-check runs             |
| step   | the logits; the backward pass of one layer; its end; a checkpoint is written       |
| gather | the largest unit is gathered for a push, while the optimizer's state is in memory  |
| push   | the same, with a second version that is being sent                                 |

In the formulas P is the number of parameters, L those of the largest layer, R those of the root (the embedding, the
head and the last norm), E those of the embedding, and N the number of ranks. Each rank reads only its own part of the
files, so loading needs no more than the part itself.
"""

from __future__ import annotations

from dataclasses import replace

from penstock_tools.sizing.hardware import CONTEXT_BYTES, PROCESS_BYTES, Gpu
from penstock_tools.sizing.memory_terms import (
    CONTEXT,
    EAGER_LOGIT_BYTES,
    Moment,
    Role,
    Setup,
    Term,
    checked_logits,
    logits_term,
    reading,
    total,
    whole_logits,
)
from penstock_tools.sizing.models import ModelShape
from penstock_tools.sizing.trained_memory import TrainedRank


def role_moments(role: Role, model: ModelShape, num_ranks: int, setup: Setup) -> list[Moment]:
    """The moments at which a rank of the role needs the most memory. For the policy it is rank 0, which also holds the
    versions that are pushed."""
    if role == "policy":
        moments = TrainedRank(model, num_ranks, setup, role).moments()
    elif role == "critic":  # only the policy has an adapter
        moments = TrainedRank(model.without_head(), num_ranks, replace(setup, lora_rank=0), role).moments()
    else:
        moments = _frozen_moments(role, model, num_ranks, setup)
    context = Term(CONTEXT, "", CONTEXT_BYTES)
    process = Term("process", "", PROCESS_BYTES)
    return [replace(moment, device=(*moment.device, context), host=(*moment.host, process)) for moment in moments]


def _frozen_moments(role: Role, model: ModelShape, num_ranks: int, setup: Setup) -> list[Moment]:
    """A reference or reward model: frozen weights, and forward passes only."""
    if role == "reference" and setup.lora_rank and setup.policy_is_reference:
        return []
    shape = model if role == "reference" else model.without_head()
    size, tokens = setup.pushed_bytes, setup.micro_batch_tokens
    is_quantized = role == "reference" and setup.reference_bits > 0
    weight_bytes = setup.reference_bits / 8 if is_quantized else size
    whole = Term("weights", f"P x {weight_bytes:g} B", weight_bytes * shape.num_parameters)
    weights = Term("weights", f"P x {weight_bytes:g} B / {num_ranks}", whole.num_bytes / num_ranks)
    root, layer = [], []
    if num_ranks > 1:
        root = [Term("gathered root", f"R x {size} B", size * shape.root_parameters)]
        layer = [Term("gathered layer, and its buffer", f"L x {size} B x 2", 2 * size * shape.layer_parameters)]
    buffer = (
        [Term("buffer of the gather", f"R x {size} B x (1 + 1/N)", root[0].num_bytes * (1 + 1 / num_ranks))]
        if root
        else []
    )
    width = 4 * shape.hidden_size + shape.attention_size + 3 * shape.active_intermediate_size
    inside = Term("inside one layer", f"{tokens} x {width} x {size} B", float(size * tokens * width))
    found = [
        Moment("load", "reading the weights", (whole if is_quantized else weights,), (reading(),)),
        Moment("load", "gathering the root", (weights, *root, *buffer)),
        Moment("step", "forward pass of a layer", (weights, *root, *layer, inside)),
    ]
    if role == "reference":
        found.append(Moment("load", "the self-check", (weights, *root, *layer, checked_logits(shape, setup))))
        states = Term("hidden states", f"{tokens} x {shape.hidden_size} x 8 B", 8.0 * tokens * shape.hidden_size)
        logits = logits_term(shape, setup, EAGER_LOGIT_BYTES - 1)
        all_logits = whole_logits(shape, setup, 2)
        found.append(Moment("step", "logits", (weights, *root, *layer, states, logits, *all_logits)))
    return found


def server_terms(model: ModelShape, tensor_parallel: int, gpu: Gpu, utilisation: float) -> list[Term]:
    """Memory of one GPU of a rollout server. The KV cache gets what weights and activations leave."""
    fixed = [
        Term("weights", f"P x 2 B / {tensor_parallel}", 2 * model.num_parameters / tensor_parallel),
        Term("activations and graphs", "", CONTEXT_BYTES),
    ]
    cache = max(0.0, gpu.memory_bytes * utilisation - total(fixed))
    return [*fixed, Term("KV cache", f"{gpu.memory_bytes / 1e9:.0f} GB x {utilisation:g} - the above", cache)]
