"""Memory that a rank of each role needs, item by item, at the moments when it needs the most.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from penstock.config.run import RunConfig
from penstock_tools.sizing.hardware import CONTEXT_BYTES, PROCESS_BYTES, Gpu
from penstock_tools.sizing.models import ModelShape

Role = Literal["policy", "reference", "critic", "reward_model"]
Phase = Literal["load", "step", "gather", "push"]
Staging = Literal["device", "host"]
Offload = Literal["none", "optimizer", "weights", "all"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "weights", "all")
STAGINGS: tuple[Staging, ...] = ("device", "host")
PHASES: tuple[Phase, ...] = ("load", "step", "gather", "push")

EAGER_LOGIT_BYTES = 19
"""Bytes for each logit of a chunk if the log-probs are not compiled: the logit in 16 bits, four float32 results of the
operations on it, and a mask of 1 byte. Without a gradient there is no mask."""
COMPILED_LOGIT_BYTES = 4
"""The same if the log-probs are compiled: the logit and its gradient in 16 bits."""
REDUCED_BYTES = 4
CHECKED_TOKENS = 158
"""Tokens that the self-check of a model without windows runs and compares at once."""
READ_BYTES = 2**26
"""A rank reads its weights in pieces, and has at most this much of the files in host memory."""
CONTEXT, PROCESS = "context", "process"
STAGED = "versions staged for pushes"
CHECKPOINT_COPY = "copy for the checkpoint"
BUCKET = 2**25
"""Weights whose state is copied to the GPU at once if it is on the host."""
STAGED_VERSIONS = 2
"""Versions on rank 0: the current one and the newest. A third is there while a push takes longer than a step."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Size:
    """One part of a rank's memory, with the formula for its size."""

    name: str
    formula: str
    num_bytes: float


class Count(NamedTuple):
    """A number with its name in formulas."""

    name: str
    value: float


def sized(name: str, *factors: Count | int, each: float, copies: Count | int = 1, ranks: int = 0) -> Size:
    """A product of factors and bytes: `P x 4 B / 8` for `sized("weights", P, each=4, ranks=8)`."""
    given = (*factors, Count(f"{each:g} B", each), *[copies] * (copies != 1))
    parts = [factor if isinstance(factor, Count) else Count(str(factor), factor) for factor in given]
    formula = " x ".join(part.name for part in parts) + (f" / {ranks}" if ranks else "")
    return Size(name, formula, math.prod(part.value for part in parts) / (ranks or 1))


@dataclass(frozen=True)
class MemoryUse:
    """What a rank holds at one moment, on its GPU and on the host."""

    phase: Phase
    what: str
    device: tuple[Size, ...]
    host: tuple[Size, ...] = ()


@dataclass(frozen=True)
class Setup:
    """The settings of the learner that its memory depends on. The defaults are those of the config with `model.dtype`
    bfloat16."""

    micro_batch_tokens: int = 16384
    longest_sequence: int = 0
    """Tokens of the longest sample with its prompt. 0 if no sample is longer than a micro-batch."""
    sequence_parallel: int = 1
    """Ranks of the policy that share a sequence."""
    sharing: frozenset[tuple[str, int]] = frozenset()
    """Other roles and how many of their ranks share a sequence, if it is more than one."""
    expert_parallel: int = 1
    shard_size: int = 0
    """Policy ranks among which its weights are divided. 0 means all."""
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
    offload: Offload = "none"
    """What policy and critic keep on the host."""
    on_host: frozenset[str] = frozenset()
    """Frozen roles whose weights are on the host."""
    lora_rank: int = 0
    """Rank of the policy's adapter, which is trained instead of its weights. 0 without one."""
    critic_lora_rank: int = 0
    policy_is_reference: bool = True
    """With an adapter: whether the policy, with its adapter switched off, is the reference."""
    staging: Staging = "device"
    is_padded: bool = False
    """The model takes the padded path (docs/models.md), which holds all logits of a micro-batch. Padding is extra."""
    num_micro_batches: int = 2
    """Micro-batches of a step. From the second on, gradients are in memory during the forward pass."""

    @classmethod
    def of(cls, config: RunConfig) -> Setup:
        learner, wanted = config.learner, config.learner.compute_dtype
        return cls(
            micro_batch_tokens=learner.micro_batch_tokens,
            longest_sequence=config.rollout.engine.max_model_len,
            sequence_parallel=learner.sequence_parallel,
            sharing=frozenset(
                (name, num_sharing)
                for name in ("reference", "critic", "reward_model")
                if (num_sharing := learner.sequence_parallel_of(name)) > 1
            ),
            expert_parallel=learner.expert_parallel,
            shard_size=learner.shard_size,
            logprob_chunk_tokens=learner.logprob_chunk_tokens,
            master_bytes=_BYTES[learner.master_dtype],
            compute_bytes=(4 if config.model.dtype == "float32" else 2) if wanted == "auto" else _BYTES[wanted],
            pushed_bytes=_BYTES[config.model.dtype],
            recomputed=learner.activation_checkpointing,
            compiles=learner.compile,
            kept=learner.activation_memory,
            offload=learner.offload,
            on_host=frozenset(
                name
                for name, role in (("reference", learner.reference), ("reward_model", learner.reward_model))
                if role is not None and role.offload
            ),
            lora_rank=learner.lora.rank if learner.lora else 0,
            critic_lora_rank=learner.critic.lora.rank if learner.critic and learner.critic.lora else 0,
            policy_is_reference=learner.policy_is_reference,
            staging="host" if config.weights.staging == "host" else "device",
        )

    @property
    def moments_away(self) -> bool:
        return self.offload in ("optimizer", "all")

    @property
    def weights_away(self) -> bool:
        """Whether trained weights and gradients are on the host."""
        return self.offload in ("weights", "all")

    def lora_rank_of(self, role: str) -> int:
        return self.critic_lora_rank if role == "critic" else self.lora_rank

    def tokens_of(self, role: str) -> int:
        """The most tokens that a rank has in a pass. A sequence is never split over micro-batches, so the longest one
        may be more than `micro_batch_tokens`, divided by the ranks that share it."""
        return max(self.micro_batch_tokens, -(-self.longest_sequence // self.num_sharing(role)))

    def num_sharing(self, role: str) -> int:
        return self.sequence_parallel if role == "policy" else dict(self.sharing).get(role, 1)


def total(items: Sequence[Size]) -> float:
    return sum(item.num_bytes for item in items)


def peak(uses: Sequence[MemoryUse], phase: Phase | None = None) -> MemoryUse:
    """The moment of a phase, or of all, at which the GPU is fullest."""
    return max((use for use in uses if phase in (None, use.phase)), key=lambda m: total(m.device))


def saved_bytes(uses: Sequence[MemoryUse]) -> float:
    """Bytes of a rank's part of a checkpoint, which it copies to the host."""
    return sum(part.num_bytes for use in uses for part in use.host if part.name == CHECKPOINT_COPY)


def layer_width(model: ModelShape, *, compiles: bool, num_sharing: int = 1, expert_parallel: int = 1) -> int:
    """Numbers per token that a layer keeps for its backward pass: norms, attention, and the feed-forward network.

    Compiled layers fuse the norms and the gate, and keep less. Each expert gets copies of its tokens, and ranks that
    share experts exchange them."""
    num_copies = 4 if expert_parallel > 1 else 2
    copies = num_copies * model.experts.per_token * model.hidden_size if model.experts else 0
    norms, gates = (4, 3) if compiles else (8, 4)
    attention = model.shared_attention_size(num_sharing)
    return norms * model.hidden_size + attention + gates * model.active_intermediate_size + copies


def trained_parameters(model: ModelShape, rank: int) -> int:
    """Parameters that are trained: all, or with a LoRA rank an adapter for the attention and the feed-forward network
    of every layer. Experts get none."""
    if not rank:
        return model.num_parameters
    hidden, keys = model.hidden_size, model.num_kv_heads * model.head_size
    queries = model.num_heads * model.head_size
    attention = 2 * (hidden + queries) + 2 * (hidden + keys)
    inner = model.experts.shared_size if model.experts else model.intermediate_size
    return model.num_layers * rank * (attention + (3 * (hidden + inner) if inner else 0))


def _counts(model: ModelShape) -> tuple[Count, Count, Count, Count]:
    """The parameters of the model, of its largest layer, of the root and of the embedding."""
    whole, layer = Count("P", model.weights.total), Count("L", model.weights.largest_layer)
    return whole, layer, Count("R", model.weights.root), Count("E", model.embedding_parameters)


def _gathered_layer(model: ModelShape, setup: Setup) -> Count:
    """The parameters of the largest layer that a rank gathers, without the experts that only other ranks compute."""
    elsewhere = model.experts_of_layer * (1 - 1 / setup.expert_parallel)
    return Count("(L - experts of other ranks)" if elsewhere else "L", model.weights.largest_layer - elsewhere)


def _logits(model: ModelShape, setup: Setup, num_tokens: int, *, has_gradient: bool) -> Size:
    """Logits are computed for some tokens, or for some of the vocabulary, at a time."""
    each = EAGER_LOGIT_BYTES if has_gradient else EAGER_LOGIT_BYTES - 1
    if has_gradient and setup.compiles:
        each = COMPILED_LOGIT_BYTES * setup.compute_bytes // 2
    return sized("logits of a chunk", min(setup.logprob_chunk_tokens, num_tokens), model.vocabulary_size, each=each)


def _checked_logits(model: ModelShape, setup: Setup) -> Size:
    return _logits(model, setup, CHECKED_TOKENS, has_gradient=False)


def _whole_logits(model: ModelShape, setup: Setup, num_copies: int) -> list[Size]:
    """All logits of a micro-batch, which only the padded path has: as the model returns them and those of the response
    tokens and, in a step, the gradients of both."""
    sizes = setup.micro_batch_tokens, model.vocabulary_size
    return [sized("logits of the micro-batch", *sizes, each=setup.compute_bytes, copies=num_copies)] * setup.is_padded


def _bucket(num_trained: float, setup: Setup) -> list[Size]:
    """What an update copies to the GPU at once, of a rank with so many trained parameters, if that is on the host."""
    bucket, num_parts = Count("bucket", min(BUCKET, num_trained)), 2 * setup.moments_away + 2 * setup.weights_away
    return [sized("a bucket of the update", bucket, each=num_parts * setup.master_bytes)] * (num_parts > 0)


_READING = Size("pieces of the files", "", READ_BYTES)


def _trained_memory(role: Role, model: ModelShape, num_ranks: int, setup: Setup) -> list[MemoryUse]:
    """A rank of the policy or the critic.

    FSDP2 has one unit for each layer and one for the root (the embedding, the head and the last norm), which stays
    gathered during a whole forward or backward pass. While a layer's backward pass runs, the next layer is gathered and
    the gradients of the previous one are reduced. The root's gradients are reduced at the end, when all others are
    there. For a push, units are gathered one after the other and staged: layers, and the embedding and the head each by
    itself. A version may still be sent while the next is gathered.
    """
    (whole, whole_layer, in_root, embedding), one_layer = _counts(model), _gathered_layer(model, setup)
    tokens, size, master, hidden = setup.micro_batch_tokens, setup.compute_bytes, setup.master_bytes, model.hidden_size
    # Without FSDP2 the weights are used as they are, and nothing is gathered or reduced.
    is_sharded = num_ranks > 1 or master != size or setup.weights_away
    gathered = size if is_sharded else 0
    is_whole, is_first, num_shards = not setup.lora_rank, setup.num_micro_batches == 1, setup.shard_size or num_ranks
    trained = whole if is_whole else Count("adapter", trained_parameters(model, setup.lora_rank))
    twice = Count("(1 + 1/N)", 1 + 1 / num_shards)

    def unit(count: Count) -> list[Size]:
        """What it takes to gather a unit: the copies of all ranks arrive in a buffer and are then sorted into weights.
        A single rank casts one weight after the other."""
        if num_ranks > 1:
            buffer = sized("buffer of the gather", count, each=gathered, copies=twice)
        else:
            buffer = sized("a weight that is cast", min(embedding, count, key=lambda each: each.value), each=gathered)
        return [sized("gathered unit", count, each=gathered), buffer]

    # The state: with an adapter, only it has gradients and moments.
    weights = sized("weights", whole, each=master, ranks=num_shards)
    kept = [weights] if is_whole else [weights, sized("adapter", trained, each=master, ranks=num_shards)]
    gradients = sized("gradients", trained, each=master, ranks=num_shards)
    adam = sized("Adam", trained, each=2 * master, ranks=num_shards)
    state = [*kept, gradients, adam]
    before = [*kept, adam] if is_first else state
    # The only micro-batch makes the gradients layer by layer, from the last on, and frees the inputs of the layers.
    others = Count("(P - L - R)", is_first * is_whole * (whole.value - one_layer.value - in_root.value))
    # What a pass holds.
    root = sized("gathered root", in_root, each=gathered)
    layer_buffer = [sized("buffer of a gathered layer", one_layer, each=gathered)] * (num_ranks > 1)
    head_gradient = [sized("gradient of the head", embedding, each=size)] * (role == "policy" and is_whole)
    num_recomputed = round(model.num_layers * setup.recomputed)
    width = layer_width(
        model, compiles=setup.compiles, num_sharing=setup.num_sharing(role), expert_parallel=setup.expert_parallel
    )
    kept_width = round((setup.kept if setup.compiles else 1.0) * width)
    inputs = [
        sized("inputs of the layers", tokens, hidden, num_recomputed, each=size),
        sized("activations of the layers", tokens, kept_width, model.num_layers - num_recomputed, each=size),
    ]
    layer = [
        sized("gathered layer", one_layer, each=gathered),
        *[sized("next layer, being gathered", one_layer, each=gathered)] * (num_ranks > 1),
        sized("inside one layer", tokens, width + 2 * model.active_intermediate_size, each=size),
    ]
    if is_whole:
        layer.append(sized("gradients of the layer", one_layer, each=gathered))
        layer.append(sized("gradients that are being reduced", one_layer, each=REDUCED_BYTES if is_sharded else 0))
    logits = [
        _logits(model, setup, tokens, has_gradient=True),
        sized("hidden states and their gradient", tokens, hidden, each=7 * size),
        *head_gradient, *layer_buffer, *_whole_logits(model, setup, 4),
    ]  # fmt: skip
    end = []
    if is_sharded and is_whole:
        reduced = max(size + REDUCED_BYTES, REDUCED_BYTES * twice.value) - (master / num_shards if is_first else 0)
        end = [Size("gradients of the root that are being reduced", "", reduced * in_root.value)]

    def use(phase: Phase, what: str, state: list[Size], others: list[Size], host: Sequence[Size] = ()) -> MemoryUse:
        """The moment with the state on the GPU or, as `offload` says, on the host, and with the versions for pushes."""
        staged = sized(STAGED, trained, each=setup.pushed_bytes, copies=1 if phase == "gather" else STAGED_VERSIONS)
        versions = [staged] * (role == "policy" and phase != "load")
        away = [each for each in state if (setup.moments_away if each == adam else setup.weights_away)]
        device = [*(each for each in state if each not in away), *others, *versions * (setup.staging == "device")]
        held = [*away, *host, *versions * (setup.staging == "host")]
        return MemoryUse(phase, what, tuple(each for each in device if each.num_bytes), tuple(held))

    uses = [
        use("load", "reading the weights", [weights], [], [_READING]),
        use("load", "gathering the root", [weights], unit(in_root)),
        use("load", "the self-check", [weights], [root, *layer_buffer, _checked_logits(model, setup)]),
        use("step", "backward pass of a layer", before, [root, *layer, *head_gradient, *inputs]),
        use("step", "backward pass of the first layer",
            [*before, sized("gradients of the other layers", others, each=master, ranks=num_shards)],
            [root, *layer, *head_gradient]),
        use("step", "end of the backward pass", state, end),
        use("step", "the update", state, _bucket(trained.value / num_shards, setup)),
        use("step", "a checkpoint is written", state, [],
            [Size(CHECKPOINT_COPY, "weights and Adam", total([*kept, adam]))]),
    ]  # fmt: skip
    if role == "policy":
        alone = sized("gathered embedding", embedding, each=gathered, copies=twice if num_ranks > 1 else 1)
        experts = [
            *[sized("its experts, one by one", whole_layer, each=size)] * (model.experts is not None and is_whole),
            *[Size("experts of all ranks", "", size * model.experts_of_layer)] * (setup.expert_parallel > 1),
        ]
        largest = max([alone], [*unit(one_layer), *experts], key=total)
        uses += [
            use("step", "logits", before, [root, *logits, *inputs]),
            use("gather", "gathering the largest unit", state, largest),
            use("push", "sending a version, gathering the next", state, largest),
        ]
    return uses


def _frozen_memory(role: Role, model: ModelShape, num_ranks: int, setup: Setup) -> list[MemoryUse]:
    """A reference or reward model: frozen weights, and forward passes only."""
    (whole, one_layer, in_root, _), size, tokens = _counts(model), setup.pushed_bytes, setup.micro_batch_tokens
    on_host, is_sharded = role in setup.on_host, num_ranks > 1 or role in setup.on_host
    weights = sized("weights", whole, each=size, ranks=num_ranks)
    root = [sized("gathered root", in_root, each=size)] * is_sharded
    layer = [sized("gathered layer, and its buffer", one_layer, each=size, copies=2)] * is_sharded
    twice = Count("(1 + 1/N)", 1 + 1 / num_ranks)
    buffer = [sized("buffer of the gather", in_root, each=size, copies=twice)] * is_sharded
    attention = model.shared_attention_size(setup.num_sharing(role))
    width = 4 * model.hidden_size + attention + 3 * model.active_intermediate_size
    inside = sized("inside one layer", tokens, width, each=size)

    def use(phase: Phase, what: str, others: Sequence[Size], host: Sequence[Size] = ()) -> MemoryUse:
        return MemoryUse(phase, what, (*[weights] * (not on_host), *others), (*[weights] * on_host, *host))

    found = [
        use("load", "reading the weights", (), (_READING,)),
        use("load", "gathering the root", (*root, *buffer)),
        use("step", "forward pass of a layer", (*root, *layer, inside)),
    ]
    if role == "reference":
        found.append(use("load", "the self-check", (*root, *layer, _checked_logits(model, setup))))
        states = sized("hidden states", tokens, model.hidden_size, each=8)
        logits = (_logits(model, setup, tokens, has_gradient=False), *_whole_logits(model, setup, 2))
        found.append(use("step", "logits", (*root, *layer, states, *logits)))
    return found


def role_memory(role: Role, model: ModelShape, num_ranks: int, setup: Setup) -> list[MemoryUse]:
    """The moments at which a rank of the role needs the most memory. For the policy it is rank 0, which also holds the
    versions that are pushed. None for a reference that is the policy with its adapter switched off."""
    if role == "reference" and setup.lora_rank and setup.policy_is_reference:
        return []
    setup = replace(setup, micro_batch_tokens=setup.tokens_of(role), lora_rank=setup.lora_rank_of(role))
    if role != "policy":
        setup = replace(setup, expert_parallel=1, shard_size=0)
    shape = model if role in ("policy", "reference") else model.without_head()
    uses = (_trained_memory if role in ("policy", "critic") else _frozen_memory)(role, shape, num_ranks, setup)
    context, process = Size(CONTEXT, "", CONTEXT_BYTES), Size(PROCESS, "", PROCESS_BYTES)
    return [replace(use, device=(*use.device, context), host=(*use.host, process)) for use in uses]


@cache
def peak_bytes(role: Role, model: ModelShape, num_ranks: int, setup: Setup) -> float:
    """Bytes of a rank's GPU when that is fullest."""
    uses = role_memory(role, model, num_ranks, setup)
    return total(peak(uses).device) if uses else 0.0


def server_memory(model: ModelShape, tensor_parallel: int, gpu: Gpu, utilization: float) -> MemoryUse:
    """Memory of one GPU of a rollout server. The KV cache, the last item, gets what weights and activations leave."""
    whole = Count("P", model.num_parameters)
    fixed = [sized("weights", whole, each=2, ranks=tensor_parallel), Size("activations and graphs", "", CONTEXT_BYTES)]
    room = max(0.0, gpu.memory_bytes * utilization - total(fixed))
    kv_cache = Size("KV cache", f"{gpu.memory_bytes / 1e9:.0f} GB x {utilization:g} - the above", room)
    staged = sized("a version that is being received", whole, each=2)
    return MemoryUse("step", "decoding", (*fixed, kv_cache), (staged,))
