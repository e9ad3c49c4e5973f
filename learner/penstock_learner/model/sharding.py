"""Makes a model ready to train: recomputed activations, compiled layers, FSDP2 with its precision and offload."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from penstock.config.learner import LearnerConfig
from penstock.errors import ConfigError
from penstock_learner.model.loading import decoder_layers
from penstock_learner.model.torch_settings import compiler_keeping


class LayeredModel(Protocol):
    """An `nn.Module` around a Hugging Face model with a list of decoder layers."""

    lm: Any

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...


def prepare_for_training(
    model: LayeredModel, learner: LearnerConfig, compute_dtype: torch.dtype, *, is_cuda: bool
) -> None:
    """Choose which layers are recomputed, compile them where the config says so, and shard the model. Gradients are
    reduced in float32 whatever the compute type is. Raises ConfigError for quantized weights."""
    if is_quantized(model):
        raise ConfigError(
            f"a model of type {model.lm.config.model_type} with quantized weights cannot be trained; give a folder "
            "with its weights in bfloat16 or float32"
        )
    layers = list(decoder_layers(model.lm)[1])
    # The activations of the first layers live longest. Gradients take the memory that the last layers free.
    num_recomputed = round(len(layers) * learner.activation_checkpointing)
    for index, layer in enumerate(layers):
        is_recomputed = index < num_recomputed
        if learner.compile:
            # Recomputed activations live for one layer's backward pass only, so keeping fewer of them saves nothing.
            kept = 1.0 if is_recomputed else learner.activation_memory
            layer.forward = torch.compile(layer.forward, backend=compiler_keeping(kept))
        if is_recomputed:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=is_cuda) if learner.cpu_offload else OffloadPolicy()
    # On a CPU the memory that resharding saves is not worth gathering the weights twice.
    shard(model, reshard_after_forward=is_cuda, precision=precision, offload=offload)


def shard(
    model: LayeredModel,
    *,
    reshard_after_forward: bool = True,
    precision: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    offload: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # frozen
) -> None:
    """Apply FSDP2 over the default process group: to each decoder layer, then to the root with the remaining weights.
    With a single rank the model stays as it is, unless its weights must be cast or offloaded. Quantized weights stay as
    they are too: every rank has all of them."""
    if is_quantized(model):
        return
    types = {parameter.dtype for parameter in model.parameters()}
    if (
        dist.get_world_size() == 1
        and types <= {precision.param_dtype or next(iter(types))}
        and offload == OffloadPolicy()
    ):
        return
    layers = list(decoder_layers(model.lm)[1])
    assert isinstance(model, nn.Module)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward, mp_policy=precision, offload_policy=offload)
    fully_shard(model, reshard_after_forward=reshard_after_forward, mp_policy=precision, offload_policy=offload)


def is_quantized(model: LayeredModel) -> bool:
    return getattr(model.lm.config, "quantization_config", None) is not None


def full_weight(parameter: Tensor) -> Tensor:
    """The whole parameter. Collective where it is sharded: every rank calls it, in the same order."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
