"""Memory of a rank that trains: the policy and the critic.

FSDP2 has one unit for each layer and one for the root (the embedding, the head and the last norm), which stays gathered
during a whole forward or backward pass. While a layer's backward pass runs, the next layer is gathered and the
gradients of the previous one are reduced. The root's gradients are reduced at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock_tools.sizing.memory_terms import (
    COMPILED_LOGIT_BYTES,
    EAGER_LOGIT_BYTES,
    REDUCED_BYTES,
    STAGED,
    STAGED_VERSIONS,
    Moment,
    Phase,
    Role,
    Setup,
    Term,
    adapter_parameters,
    checked_logits,
    kept_width,
    layer_width,
    logits_term,
    reading,
    total,
    whole_logits,
)
from penstock_tools.sizing.models import ModelShape


class TrainedRank:
    """A rank of the policy or the critic."""

    def __init__(self, model: ModelShape, num_ranks: int, setup: Setup, role: Role) -> None:
        self.model = model
        self.num_ranks = num_ranks
        self.setup = setup
        self.role = role
        self.is_sharded = num_ranks > 1 or setup.master_bytes != setup.compute_bytes or setup.cpu_offload
        """Whether FSDP2 is used. Otherwise the weights are used as they are."""

    def moments(self) -> list[Moment]:
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
    ) -> Moment:
        """The moment with its state on the GPU, or with offload on the host."""
        others = [term for term in others if term.num_bytes]
        if self.role == "policy" and phase != "load":
            staged = self._staged(num_staged)
            others, host = ([*others, *staged], host) if self.setup.staging == "device" else (others, [*host, *staged])
        if self.setup.cpu_offload:
            return Moment(phase, what, tuple(others), (*state, *host))
        return Moment(phase, what, (*state, *others), tuple(host))

    # ── phases ──

    def _load(self) -> list[Moment]:
        """Each rank reads its part of the files. Then the self-check runs forward passes of a few tokens."""
        root = self._unsharded(self.model.root_parameters, "R")
        checked = [self._gathered(), *self._gathered_layer(), checked_logits(self.model, self.setup)]
        return [
            self._placed("load", "reading the weights", [self._weights()], [], [reading()]),
            self._placed("load", "gathering the root", [self._weights()], root),
            self._placed("load", "the self-check", [self._weights()], checked),
        ]

    def _step(self) -> list[Moment]:
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

    def _push(self) -> list[Moment]:
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
