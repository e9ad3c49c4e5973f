"""Low-rank adapters (LoRA): add one to a model, and switch it off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.learner import ALL_LINEAR, LoraConfig
from penstock.errors import ConfigError
from penstock.weights.transports import A_SUFFIX, B_SUFFIX
from penstock_learner.model.causal_lm import CausalLM
from penstock_learner.model.experts import adapt_experts
from penstock_learner.model.loading import FolderModel, decoder_layers
from penstock_learner.model.published_layout import published_factors, published_names, to_published
from penstock_learner.model.routers import find_routers
from penstock_learner.model.scalar_model import ScalarModel


def add_adapter(model: CausalLM, config: LoraConfig) -> None:
    """Freeze the weights and add a low-rank adapter to its targets. At first the adapter changes nothing. Raises
    ConfigError if a target does not exist, or if engines could not add the adapter to it."""
    names = published_names(model.lm, _linear_weights(model.lm))
    targets = _targets(model.lm, config, set(names), "learner.lora")
    for name in sorted(targets - names.keys()):
        _require_divisible(model.lm, name)
    _inject(model, config, targets)
    model.adapted = {name: names[name] for name in targets & names.keys()}


def add_critic_adapter(model: ScalarModel, config: LoraConfig, key: str) -> None:
    """The same for a critic, whose head is trained whole."""
    _inject(model, config, _targets(model.lm, config, set(_linear_weights(model.lm)), key))
    model.lm.score.requires_grad_(True)


def _targets(lm: Any, config: LoraConfig, weights: set[str], key: str) -> set[str]:
    """The names of the weights that are adapted: some of `weights`, and fused experts."""
    linear, fused = {name.removesuffix(".weight") for name in weights}, _fused_weights(lm)
    if not linear:
        raise ConfigError(f"{key}: a model of type {lm.config.model_type} has no linear layers to adapt")
    if config.target_modules == ALL_LINEAR:
        return weights
    named = _named_parts(lm, config.target_modules, fused, key)
    if others := sorted(named - linear - fused):
        raise ConfigError(
            f"{key}.target_modules: {others[0]} is not a linear layer of the decoder, or model folders hold it in "
            f"another form, in which it cannot be adapted; omit it, or use {ALL_LINEAR}"
        )
    return {name if name in fused else f"{name}.weight" for name in named}


def _inject(model: FolderModel, config: LoraConfig, targets: set[str]) -> None:
    """Freeze the model and add the adapter."""
    import peft

    prefix, layers = decoder_layers(model.lm)
    names = {name.removeprefix(f"{prefix}.") for name in targets}
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    parameters = [name for name in names if not name.endswith(".weight")]
    adapter = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=modules, target_parameters=parameters, lora_dropout=0.0
    )
    model.requires_grad_(False)  # peft freezes what it is given, and embedding, last norm and head are outside
    # Given the whole model, peft would take the names of a mixture's linear layers for those of its fused experts.
    peft.inject_adapter_in_model(adapter, layers)
    adapt_experts(model.lm)
    model.lm.peft_config = {"default": adapter}


def _fused_weights(lm: Any) -> set[str]:
    """Names of the weights of fused experts that an adapter may change."""
    return {
        f"{module_name}.{name}"
        for module_name, module in lm.named_modules()
        for name, weight in (module.named_parameters(recurse=False) if hasattr(module, "is_concatenated") else ())
        if weight.dim() == 3
    }


def _require_divisible(lm: Any, weight: str) -> None:
    """Raise ConfigError if the tensors of the folder are not made of whole rows of a fused weight, so that a server
    could not add what the adapter adds to it."""
    try:
        is_divisible = _is_divisible(lm, weight)
    except (ValueError, KeyError, RuntimeError):  # transformers cannot convert this weight without others
        is_divisible = False
    if not is_divisible:
        raise ConfigError(
            f"learner.lora.target_modules: model folders of type {lm.config.model_type} hold {weight} in a form in "
            "which it cannot be adapted; omit it"
        )


def _is_divisible(lm: Any, weight: str) -> bool:
    """Numbers stand for the rows of the first factor, and for the experts."""
    rank, fused = 2, lm.get_parameter(weight)
    experts = torch.arange(fused.shape[0])[:, None, None]
    low = experts * rank + torch.arange(rank)[:, None]
    published = published_factors(lm, weight, low, experts.expand(-1, fused.shape[1], 1))
    for name, tensor in to_published(lm, {weight: fused}).items():
        own, owner = published[name + A_SUFFIX], published[name + B_SUFFIX]
        wanted = low if tensor.dim() == 3 else low[owner.flatten()[0]]
        if owner.shape[:-1] != tensor.shape[:-1] or not torch.equal(own, wanted):
            return False
    return True


def _named_parts(lm: Any, targets: Sequence[str], fused: set[str], key: str) -> set[str]:
    """Names of the modules that the targets name, whole or by their last parts, and of `fused` weights that they name
    with their module, such as `experts.down_proj`. Raises ConfigError if a target has none."""
    names = [name for name, _ in lm.named_modules()]
    found = {}
    for target in targets:
        known = [*names, *fused] if "." in target else names
        found[target] = {name for name in known if name == target or name.endswith(f".{target}")}
    if unknown := [target for target, modules in found.items() if not modules]:
        raise ConfigError(f"{key}.target_modules does not fit the model: it has no module {unknown[0]}")
    return set().union(*found.values())


@contextmanager
def adapter_off(model: CausalLM) -> Iterator[None]:
    """Inside, the model computes what it computed before it got its adapter. The adapter's weights and gradients stay
    as they are. Raises ConfigError if the installed peft cannot switch the adapter off: the policy would be compared
    with itself."""
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.lm.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer._disable_adapters = True  # `enable_adapters` would also change which sharded parameters are trained
        if not layers or not all(layer.disable_adapters is True for layer in layers):
            raise ConfigError(
                f"peft {peft.__version__} does not let the learner switch an adapter off; install the version of "
                "deploy/python/requirements.txt, or set learner.reference.path"
            )
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _linear_weights(lm: Any) -> dict[str, Tensor]:
    """The weights of all linear layers of the decoder. Routers are skipped: an adapter would unbalance the experts."""
    prefix, layers = decoder_layers(lm)
    routers = tuple(f"{router.name}." for router in find_routers(lm))
    linear = {
        f"{prefix}.{name}.weight": module.weight for name, module in layers.named_modules() if type(module) is nn.Linear
    }
    return {name: weight for name, weight in linear.items() if not name.startswith(routers)}
