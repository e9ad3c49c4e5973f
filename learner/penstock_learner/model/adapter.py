"""Low-rank adapters (LoRA): add one to a model, and select the parameters that a weight push sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.config.learner import LoraConfig
from penstock_learner.model.causal_lm import CausalLM

_LORA_A, _LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"
"""Endings of the names that peft gives to an adapter's two matrices."""


def add_adapter(model: CausalLM, config: LoraConfig) -> None:
    """Freeze the weights and add a low-rank adapter to those it targets. At first the adapter changes nothing."""
    import peft

    adapter = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=list(config.target_modules), lora_dropout=0.0
    )
    peft.inject_adapter_in_model(adapter, model.lm)
    model.has_adapter = True


@contextmanager
def adapter_off(model: CausalLM) -> Iterator[None]:
    """Inside, the model computes what it computed before it got its adapter: it is the policy that the run began with.

    The adapter's weights and their gradients stay as they are."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.lm.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer._disable_adapters = True  # `enable_adapters` would also change which sharded parameters are trained
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def is_pushed(model: CausalLM, name: str) -> bool:
    """Whether a push sends the parameter: every parameter, or only the adapter's if the model has one."""
    return not model.has_adapter or name.endswith((_LORA_A, _LORA_B))


def pushed_name(name: str) -> str:
    """A parameter's name as rollout servers know it.

    A plain weight keeps its Hugging Face name. A matrix of an adapter is named after the weight that it changes, for
    example `model.layers.0.mlp.up_proj.weight.lora_A`."""
    for ending, suffix in ((_LORA_A, "lora_A"), (_LORA_B, "lora_B")):
        if name.endswith(ending):
            return f"{name.removesuffix(ending)}.weight.{suffix}"
    return name
