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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.config.run import RunConfig
from penstock_tools.sizing.hardware import CONTEXT_BYTES, PROCESS_BYTES, Gpu
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
class MemoryUse:
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


def peak(moments: Sequence[MemoryUse], phase: Phase | None = None) -> MemoryUse:
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


# ── a rank that trains: the policy and the critic ──


class TrainedRank:
    """A rank of the policy or the critic.

    FSDP2 has one unit for each layer and one for the root (the embedding, the head and the last norm), which stays
    gathered during a whole forward or backward pass. While a layer's backward pass runs, the next layer is gathered and
    the gradients of the previous one are reduced. The root's gradients are reduced at the end.
    """

    def __init__(self, model: ModelShape, num_ranks: int, setup: Setup, role: Role) -> None:
        self.model = model
        self.num_ranks = num_ranks
        self.setup = setup
        self.role = role
        self.is_sharded = num_ranks > 1 or setup.master_bytes != setup.compute_bytes or setup.cpu_offload
        """Whether FSDP2 is used. Otherwise the weights are used as they are."""

    def moments(self) -> list[MemoryUse]:
        found = [*self._load(), *self._step()]
        if self.role == "policy":
            found += self._push()
        return found

    # ── state ──

    def _weights(self) -> Term:
        size = self.setup.master_bytes
        return Term("weights", f"P x {size} B / {self.num_ranks}", size * self.model.num_parameters / self.num_ranks)

    def _state(self, share_of_gradients: float = 1.0) -> list[Term]:
        """Weights, gradients and Adam's state. With an adapter only it has gradients and state."""
        size, num_ranks = self.setup.master_bytes, self.num_ranks
        trained, name = self.model.num_parameters, "P"
        terms = [self._weights()]
        if self.setup.lora_rank:
            trained, name = adapter_parameters(self.model, self.setup.lora_rank), "adapter"
            terms.append(Term("adapter", f"adapter x {size} B / {num_ranks}", size * trained / num_ranks))
        terms += [
            Term("gradients", f"{name} x {size} B / {num_ranks}", share_of_gradients * size * trained / num_ranks),
            Term("Adam", f"{name} x {2 * size} B / {num_ranks}", 2 * size * trained / num_ranks),
        ]
        return terms

    def _placed(
        self,
        phase: Phase,
        what: str,
        state: Sequence[Term],
        others: Sequence[Term],
        host: Sequence[Term] = (),
        num_staged: int = STAGED_VERSIONS,
    ) -> MemoryUse:
        """The moment with its state on the GPU, or with offload on the host."""
        others = [term for term in others if term.num_bytes]
        if self.role == "policy" and phase != "load":
            staged = self._staged(num_staged)
            others, host = ([*others, *staged], host) if self.setup.staging == "device" else (others, [*host, *staged])
        if self.setup.cpu_offload:
            return MemoryUse(phase, what, tuple(others), (*state, *host))
        return MemoryUse(phase, what, (*state, *others), tuple(host))

    # ── phases ──

    def _load(self) -> list[MemoryUse]:
        """Each rank reads its part of the files. Then the self-check runs forward passes of a few tokens."""
        root = self._unsharded(self.model.root_parameters, "R")
        checked = [self._gathered(), *self._gathered_layer(), checked_logits(self.model, self.setup)]
        return [
            self._placed("load", "reading the weights", [self._weights()], [], [reading()]),
            self._placed("load", "gathering the root", [self._weights()], root),
            self._placed("load", "the self-check", [self._weights()], checked),
        ]

    def _step(self) -> list[MemoryUse]:
        is_first = self.setup.num_micro_batches == 1
        before = self._state(0.0 if is_first else 1.0)
        root = self._gathered()
        found = [
            self._placed("step", "backward pass of a layer", before, [root, *self._layer(), *self._inputs()]),
            self._placed("step", "end of the backward pass", self._state(), self._end()),
            self._placed("step", "a checkpoint is written", self._state(), [], [self._checkpoint_copy()]),
        ]
        if self.role == "policy":
            found.append(self._placed("step", "logits", before, [root, *self._logits(), *self._inputs()]))
        return found

    def _push(self) -> list[MemoryUse]:
        """Units are gathered one after the other and staged: layers, and the embedding and the head each by itself. A
        version may still be sent while the next is gathered."""
        root = [self._embedding()]
        layer = self._unsharded(self.model.layer_parameters, "L")
        if self.model.experts is not None and not self.setup.lora_rank:
            copied = float(self.setup.compute_bytes * self.model.layer_parameters)
            layer.append(Term("its experts, one by one", self._bytes("L"), copied))
        unit = max(root, layer, key=total)
        return [
            self._placed("gather", "gathering the largest unit", self._state(), unit, num_staged=1),
            self._placed("push", "sending a version, gathering the next", self._state(), unit),
        ]

    def _staged(self, num_versions: int) -> list[Term]:
        """The versions that the policy's rank 0 keeps for pushes."""
        setup, model = self.setup, self.model
        pushed = adapter_parameters(model, setup.lora_rank) if setup.lora_rank else model.num_parameters
        name = "adapter" if setup.lora_rank else "P"
        formula = f"{name} x {setup.pushed_bytes} B x {num_versions}"
        return [Term(STAGED, formula, num_versions * setup.pushed_bytes * pushed)]

    # ── parts of a step ──

    def _layer(self) -> list[Term]:
        """The layer whose backward pass runs: its weights and those of the next one, gradients, and activations."""
        model, size = self.model, self.setup.compute_bytes
        weights = 0.0 if self.setup.keeps_gathered else self._gathered_bytes(model.layer_parameters)
        terms = [
            Term("gathered layer", self._bytes("L"), weights),
            Term("next layer, being gathered", self._bytes("L"), weights if self.num_ranks > 1 else 0.0),
            self._inside(),
        ]
        if not self.setup.lora_rank:
            gradients = size * model.layer_parameters if self.is_sharded else 0.0
            reduced = REDUCED_BYTES * model.layer_parameters if self.is_sharded else 0.0
            terms += [
                Term("gradients of the layer", self._bytes("L"), gradients),
                Term("gradients that are being reduced", f"L x {REDUCED_BYTES} B", reduced),
                self._head_gradient(),
            ]
        return terms

    def _end(self) -> list[Term]:
        """The root's gradients are reduced last, when all others are there."""
        if not self.is_sharded or self.setup.lora_rank:
            return []
        root, size = self.model.root_parameters, self.setup.compute_bytes
        kept = self.setup.master_bytes * root / self.num_ranks if self.setup.num_micro_batches == 1 else 0.0
        before, after = (size + REDUCED_BYTES) * root, REDUCED_BYTES * root * (1 + 1 / self.num_ranks)
        return [Term("gradients of the root that are being reduced", "", max(before, after) - kept)]

    def _logits(self) -> list[Term]:
        model, setup = self.model, self.setup
        tokens, hidden, size = setup.micro_batch_tokens, model.hidden_size, setup.compute_bytes
        return [
            logits_term(model, setup, COMPILED_LOGIT_BYTES if setup.compiles else EAGER_LOGIT_BYTES),
            Term("hidden states and their gradient", f"{tokens} x {hidden} x 14 B", 14.0 * tokens * hidden * size / 2),
            self._head_gradient(),
            *self._gathered_layer(),
            *whole_logits(model, setup, 4),
        ]

    def _checkpoint_copy(self) -> Term:
        """Training continues from this rank's weights and state while their copy is written."""
        saved = [term for term in self._state() if term.name != "gradients"]
        return Term("copy for the checkpoint", "weights and Adam", total(saved))

    def _head_gradient(self) -> Term:
        is_trained = self.role == "policy" and not self.setup.lora_rank
        num_bytes = self.setup.compute_bytes * self.model.embedding_parameters
        return Term("gradient of the head", self._bytes("E"), num_bytes if is_trained else 0.0)

    def _inputs(self) -> list[Term]:
        """Activations that are kept over the whole pass: the input of each layer that is recomputed, and what the
        others need in the backward pass."""
        model, setup = self.model, self.setup
        tokens, size = setup.micro_batch_tokens, setup.compute_bytes
        num_recomputed = round(model.num_layers * setup.recomputed)
        num_kept = model.num_layers - num_recomputed
        width = kept_width(model, setup)
        return [
            Term(
                "inputs of the layers",
                f"{tokens} x {model.hidden_size} x {num_recomputed} x {size} B",
                float(size * tokens * model.hidden_size * num_recomputed),
            ),
            Term(
                "activations of the layers",
                f"{tokens} x {width} x {num_kept} x {size} B",
                float(size * tokens * width * num_kept),
            ),
        ]

    def _inside(self) -> Term:
        """Activations of one layer, recomputed, and their gradients."""
        setup, model = self.setup, self.model
        tokens, size = setup.micro_batch_tokens, setup.compute_bytes
        width = layer_width(model, compiles=setup.compiles) + 2 * model.active_intermediate_size
        return Term("inside one layer", f"{tokens} x {width} x {size} B", float(size * tokens * width))

    # ── gathering ──

    def _gathered_bytes(self, num_parameters: int) -> float:
        return float(self.setup.compute_bytes * num_parameters) if self.is_sharded else 0.0

    def _gathered(self) -> Term:
        """What stays gathered during a pass: the root, or everything."""
        if self.setup.keeps_gathered:
            return Term("gathered weights", self._bytes("P"), self._gathered_bytes(self.model.num_parameters))
        return Term("gathered root", self._bytes("R"), self._gathered_bytes(self.model.root_parameters))

    def _gathered_layer(self) -> list[Term]:
        """The buffer of the layer that was gathered last, or is gathered next, while another part of the model runs."""
        num_bytes = self._gathered_bytes(self.model.layer_parameters) if self.num_ranks > 1 else 0.0
        return [Term("buffer of a gathered layer", self._bytes("L"), num_bytes)]

    def _embedding(self) -> Term:
        """What it takes to gather the embedding, or the head, for a push: this rank's part in the compute type, and the
        whole."""
        ranks, gathered = self.num_ranks, self._gathered_bytes(self.model.embedding_parameters)
        return Term(
            "gathered embedding", f"{self._bytes('E')} x (1 + 1/N)", gathered * (1 + 1 / ranks if ranks > 1 else 1)
        )

    def _unsharded(self, num_parameters: int, name: str) -> list[Term]:
        """What it takes to gather a unit: the copies of all ranks arrive in a buffer and are then sorted into weights.
        A single rank casts one weight after the other."""
        gathered = self._gathered_bytes(num_parameters)
        if self.num_ranks > 1:
            buffer = Term(
                "buffer of the gather", f"{self._bytes(name)} x (1 + 1/N)", gathered * (1 + 1 / self.num_ranks)
            )
        else:
            largest = min(num_parameters, self.model.embedding_parameters)
            buffer = Term("a weight that is cast", self._bytes("E"), self._gathered_bytes(largest))
        return [Term("gathered unit", self._bytes(name), gathered), buffer]

    def _bytes(self, name: str) -> str:
        return f"{name} x {self.setup.compute_bytes} B"


# ── every role ──


def role_moments(role: Role, model: ModelShape, num_ranks: int, setup: Setup) -> list[MemoryUse]:
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


def _frozen_moments(role: Role, model: ModelShape, num_ranks: int, setup: Setup) -> list[MemoryUse]:
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
        MemoryUse("load", "reading the weights", (whole if is_quantized else weights,), (reading(),)),
        MemoryUse("load", "gathering the root", (weights, *root, *buffer)),
        MemoryUse("step", "forward pass of a layer", (weights, *root, *layer, inside)),
    ]
    if role == "reference":
        found.append(MemoryUse("load", "the self-check", (weights, *root, *layer, checked_logits(shape, setup))))
        states = Term("hidden states", f"{tokens} x {shape.hidden_size} x 8 B", 8.0 * tokens * shape.hidden_size)
        logits = logits_term(shape, setup, EAGER_LOGIT_BYTES - 1)
        all_logits = whole_logits(shape, setup, 2)
        found.append(MemoryUse("step", "logits", (weights, *root, *layer, states, logits, *all_logits)))
    return found


def server_terms(model: ModelShape, tensor_parallel: int, gpu: Gpu, utilisation: float) -> list[Term]:
    """Memory of one GPU of a rollout server. The KV cache gets what weights and activations leave."""
    fixed = [
        Term("weights", f"P x 2 B / {tensor_parallel}", 2 * model.num_parameters / tensor_parallel),
        Term("activations and graphs", "", CONTEXT_BYTES),
    ]
    cache = max(0.0, gpu.memory_bytes * utilisation - total(fixed))
    return [*fixed, Term("KV cache", f"{gpu.memory_bytes / 1e9:.0f} GB x {utilisation:g} - the above", cache)]
