"""Low-rank adapters (LoRA): add one to a model, and switch it off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from penstock.config.learner import ALL_LINEAR, LoraConfig
from penstock.errors import ConfigError
from penstock_learner.model.causal_lm import CausalLM
from penstock_learner.model.loading import FolderModel, decoder_layers
from penstock_learner.model.published_layout import published_names
from penstock_learner.model.routers import find_routers
from penstock_learner.model.scalar_model import ScalarModel


def add_adapter(model: CausalLM, config: LoraConfig) -> None:
    """Freeze the weights and add a low-rank adapter to its target modules. At first the adapter changes nothing. Raises
    ConfigError if a target does not exist, or if engines could not add the adapter to it."""
    names = published_names(model.lm, _linear_weights(model.lm))
    adapted = _inject(model, config, set(names), "learner.lora")
    model.adapted = {name: names[name] for name in adapted}


def add_critic_adapter(model: ScalarModel, config: LoraConfig, key: str) -> None:
    """The same for a critic, whose head is trained whole."""
    _inject(model, config, set(_linear_weights(model.lm)), key)
    model.lm.score.requires_grad_(True)


def _inject(model: FolderModel, config: LoraConfig, weights: set[str], key: str) -> set[str]:
    """Freeze the model and add the adapter. Returns the names of the weights that are adapted, out of `weights`."""
    import peft

    linear = {name.removesuffix(".weight") for name in weights}
    if not linear:
        raise ConfigError(f"{key}: a model of type {model.lm.config.model_type} has no linear layers to adapt")
    is_all = config.target_modules == ALL_LINEAR
    adapted = linear if is_all else _named_modules(model.lm, config.target_modules, key)
    if others := sorted(adapted - linear):
        raise ConfigError(
            f"{key}.target_modules: {others[0]} is not a linear layer of the decoder, or model folders hold it in "
            f"another form, in which it cannot be adapted; omit it, or use {ALL_LINEAR}"
        )
    prefix, layers = decoder_layers(model.lm)
    targets = [name.removeprefix(f"{prefix}.") for name in adapted]
    adapter = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0)
    model.requires_grad_(False)  # peft freezes what it is given, and embedding, last norm and head are outside
    # Given the whole model, peft would take the names of a mixture's linear layers for those of its fused experts.
    peft.inject_adapter_in_model(adapter, layers)
    model.lm.peft_config = {"default": adapter}
    return {f"{name}.weight" for name in adapted}


def _named_modules(lm: Any, targets: Sequence[str], key: str) -> set[str]:
    """Names of the modules that the targets name, whole or by their last parts. Raises ConfigError if one has none."""
    names = [name for name, _ in lm.named_modules()]
    found = {target: {name for name in names if name == target or name.endswith(f".{target}")} for target in targets}
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
