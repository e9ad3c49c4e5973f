"""A Hugging Face causal model as the learner sees it: packed tokens in, log-probs and entropies of the response out.

`prepare` makes it trainable: activations computed again, compiled layers, FSDP2 with its precision and offload. The
[tokens, vocabulary] logits are never whole in memory (`log_prob_head.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from penstock.config.learner import LearnerConfig, LoraConfig
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock_learner.model import attention
from penstock_learner.model.attention import Packing
from penstock_learner.model.device_copies import to_device
from penstock_learner.model.log_prob_head import log_probs_and_entropy
from penstock_learner.model.packing import SequenceBatch
from penstock_learner.model.sequence_parallel import SequenceParallel

if TYPE_CHECKING:
    from penstock_learner.model.scalar_model import PackedScalarModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By the names that `model.dtype` takes."""
_LORA_A, _LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"
"""How peft names an adapter's two halves."""


@dataclass(frozen=True)
class ModelInputs:
    """A micro-batch on the device."""

    token_ids: Tensor
    """[N]"""
    packing: Packing
    predicting: Tensor
    """[T] the token whose hidden state predicts each response token: the one before it."""
    targets: Tensor
    """[T] the response tokens."""
    temperatures: Tensor
    """[T]"""

    @classmethod
    def of(cls, batch: SequenceBatch, device: torch.device, parallel: SequenceParallel | None = None) -> ModelInputs:
        token_ids = to_device(batch.token_ids, device)
        index = to_device(batch.response_index, device)
        temperatures = to_device(batch.temperatures[batch.sequence_ids], device)
        packing = Packing.of(batch.lengths, device, parallel)
        return cls(token_ids, packing, index - 1, token_ids[index], temperatures)


class PackedCausalLM(nn.Module):
    """Wraps the model so that the sharded root covers embedding, layers and head in one forward."""

    def __init__(self, lm: nn.Module, chunk_tokens: int) -> None:
        super().__init__()
        self.lm: Any = lm
        self.chunk_tokens = chunk_tokens
        self.has_adapter = False
        self.is_compiled = False

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Log-prob [T], with gradient, and entropy [T], without, of every response token."""
        parallel, num_tokens = inputs.packing.parallel, len(inputs.token_ids)
        if parallel is None:
            hidden = hidden_states(self.lm, inputs)
            return self._head(hidden[inputs.predicting], inputs.targets, inputs.temperatures)
        own = parallel.own(num_tokens)
        mine = ((inputs.predicting >= own.start) & (inputs.predicting < own.stop)).nonzero().squeeze(1)
        tokens, positions = (
            parallel.pad(values[own], num_tokens) for values in (inputs.token_ids, inputs.packing.columns)
        )
        hidden = _backbone(self.lm, tokens, positions, inputs.packing)
        results = self._head(
            hidden[inputs.predicting[mine] - own.start], inputs.targets[mine], inputs.temperatures[mine]
        )
        log_probs, entropy = (parallel.whole(result, mine, len(inputs.targets)) for result in results)
        return log_probs, entropy

    def _head(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        return log_probs_and_entropy(
            hidden,
            self.lm.lm_head.weight,
            targets,
            temperatures,
            chunk_tokens=self.chunk_tokens,
            compiled=self.is_compiled,
        )


def hidden_states(lm: Any, inputs: ModelInputs) -> Tensor:
    """[N, hidden] of the packed tokens, after the last layer; `lm` is a Hugging Face model with a backbone `model`."""
    return _backbone(lm, inputs.token_ids, inputs.packing.columns, inputs.packing)


def _backbone(lm: Any, token_ids: Tensor, positions: Tensor, packing: Packing) -> Tensor:
    states: Tensor = lm.model(
        input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), packing=packing, use_cache=False
    ).last_hidden_state[0]
    return states


def load_model(path: Path, dtype: torch.dtype, chunk_tokens: int) -> PackedCausalLM:
    """Load a checkpoint folder with packed attention. Never reaches the network."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path {path} is not a model folder (no config.json); give a Hugging Face checkpoint")
    from transformers import AutoModelForCausalLM

    attention.register()
    lm = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True
    )
    if getattr(lm.lm_head, "bias", None) is not None:
        raise ConfigError(f"model.path {path} has a bias in its head, which the learner cannot train; use another")
    return PackedCausalLM(lm, chunk_tokens)


def prepare(
    model: PackedCausalLM | PackedScalarModel, learner: LearnerConfig, compute_dtype: torch.dtype, *, is_cuda: bool
) -> None:
    """Make a loaded model ready to train: what is computed again, what is compiled, and how it is sharded.

    Gradients are reduced in float32 whatever the compute type is."""
    layers = list(model.lm.model.layers)
    # The first layers' activations live longest, and gradients take the place of what the last ones free.
    num_again = round(len(layers) * learner.activation_checkpointing)
    # Layers share what is compiled: for each share kept, for equal and other lengths, with and without gradients.
    torch._dynamo.config.recompile_limit = 64
    for index, layer in enumerate(layers):
        is_again = index < num_again
        if learner.compile:
            # What is computed again lives for one layer's backward: there nothing is saved by keeping less of it.
            kept = 1.0 if is_again else learner.activation_memory
            layer.forward = torch.compile(layer.forward, backend=_compiler(kept))
        if is_again:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if isinstance(model, PackedCausalLM):
        model.is_compiled = learner.compile
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=is_cuda) if learner.cpu_offload else OffloadPolicy()
    # On a CPU the memory that resharding saves is not worth gathering twice.
    shard(model, reshard_after_forward=is_cuda, precision=precision, offload=offload)


@cache
def _compiler(kept: float) -> Callable[..., Any]:
    """torch's own, which keeps this share of a layer's activations. One for each share: layers of the same one share
    what is compiled."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        with functorch_config.patch(activation_memory_budget=kept):
            return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    return compile_graph


def compute_dtype_of(config: RunConfig) -> torch.dtype:
    """Of the passes of the roles that train."""
    wanted = config.learner.compute_dtype
    if wanted == "auto":
        return torch.float32 if config.model.dtype == "float32" else torch.bfloat16
    return DTYPES[wanted]


def shard(
    model: PackedCausalLM | PackedScalarModel,
    *,
    reshard_after_forward: bool = True,
    precision: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    offload: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # frozen
) -> None:
    """FSDP2 over the default process group: each decoder layer on its own, then the root with what is left.

    One rank has nothing to share: unless weights change their type or place, its model stays as it is."""
    types = {parameter.dtype for parameter in model.parameters()}
    if (
        dist.get_world_size() == 1
        and types <= {precision.param_dtype or next(iter(types))}
        and offload == OffloadPolicy()
    ):
        return
    for layer in model.lm.model.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward, mp_policy=precision, offload_policy=offload)
    fully_shard(model, reshard_after_forward=reshard_after_forward, mp_policy=precision, offload_policy=offload)


def add_adapter(model: PackedCausalLM, config: LoraConfig) -> None:
    """Freeze the weights and put a low-rank adapter beside those it targets. It begins as no change at all."""
    import peft

    adapter = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=list(config.target_modules), lora_dropout=0.0
    )
    peft.inject_adapter_in_model(adapter, model.lm)
    model.has_adapter = True


def is_pushed(model: PackedCausalLM, name: str) -> bool:
    """Whether rollout servers need the parameter: all, or only the adapter's."""
    return not model.has_adapter or name.endswith((_LORA_A, _LORA_B))


def pushed_name(name: str) -> str:
    """Of a parameter, as rollout servers know it: the Hugging Face name, or that of the weight it changes."""
    for ending, suffix in ((_LORA_A, "lora_A"), (_LORA_B, "lora_B")):
        if name.endswith(ending):
            return f"{name.removesuffix(ending)}.weight.{suffix}"
    return name


def full_weight(parameter: Tensor) -> Tensor:
    """The whole parameter. A collective when it is sharded: every rank calls it, in the same order."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
