"""How the learner runs a model, by its architecture: packed, padded, or not at all.

| path   | used                                                    | how                                             |
|--------|---------------------------------------------------------|-------------------------------------------------|
| packed | architectures that tests compare with the plain forward | tokens without padding, logits never whole      |
| padded | every other decoder that Hugging Face can load          | Hugging Face's own forward of right-padded rows |

A composite model, which sees or hears besides, is opened without its other parts: it keeps its type, its names and its
forward pass, and its language model takes the path of its own type (`decoder_of`, `loading.make_lm`).

A model that can take neither path is refused in one line, from its config.json alone (`require_causal`). docs/models.md
lists what was compared and what is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.run import RunConfig
from penstock.errors import ConfigError, first_line_of
from penstock_learner.model.attention.packed_attention import soft_cap

logger = logging.getLogger(__name__)
_PACKED_TYPES = """
    afmoe apertus arcee aria_text bamba bitnet cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 diffllama dots1
    ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe
    glm4_moe_lite gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe laguna lfm2 lfm2_moe llama llama4_text mellum
    mimo_v2_flash minimax_m2 ministral ministral3 mistral mixtral nanochat nemotron_h olmo olmo2 olmo3 olmo_hybrid
    olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
    recurrent_gemma seed_oss smollm3 solar_open starcoder2 vaultgemma
"""
_PACKED_PARTS = """
    ernie4_5_vl_moe_text glm4v_moe_text glm4v_text glm_ocr_text paddleocr_vl_text qwen2_5_vl_text qwen2_vl_text
    qwen3_vl_moe_text qwen3_vl_text step3p5
"""
"""Types of the language models of composite models. Where their rotary embedding has sections for height and width, all
sections have the same position for text, so it is the ordinary one."""
PACKED_TYPES = frozenset((_PACKED_TYPES + _PACKED_PARTS).split())
"""Values of `model_type` whose packed path was compared with the plain forward, token by token (docs/models.md)."""
_RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "recurrent"})
_PACKED_LAYERS = _RECURRENT_LAYERS | {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    "moe",
    "mlp",
}
_ENCODER_TYPES = """
    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert roberta
    roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod
"""
_ENCODERS = frozenset(_ENCODER_TYPES.split())
"""Types whose tokens see later tokens, unless their configuration has `is_decoder`."""
_OTHER_MODALITIES = ("text_config", "vision", "audio", "image", "video")
"""Parts of the names of nested configurations that a text-only model does not have."""
_NOT_ALONE = {
    "blip": "whose language model is an encoder made to decode",
    "diffusion_gemma": "whose tokens see the tokens after them",
    "qwen2_5_omni": "which also speaks, by parts that follow its language model",
    "qwen3_omni_moe": "which also speaks, by parts that follow its language model",
    "blip-2": "whose forward pass needs its other parts also for text alone",
    "cosmos3_edge": "whose folder has its language model's weights under names without a prefix",
    "cosmos3_omni": "whose folder has its language model's weights under names without a prefix",
    "instructblip": "whose forward pass needs its other parts also for text alone",
    "instructblipvideo": "whose forward pass needs its other parts also for text alone",
    "kosmos-2": "whose forward pass needs its other parts also for text alone",
    "mllama": "whose layers for images stand between those of its language model",
    "qwen2_audio": "whose forward pass needs its other parts also for text alone",
    "voxtral_realtime": "whose forward pass needs its other parts also for text alone",
}
"""Composite types whose language model cannot be trained alone, and why."""
_WITHOUT_LOGIT_FORM = frozenset({"aya_vision", "cohere2_vision", "granite_speech", "granite_speech_plus", "paligemma"})
"""Composite types whose forward pass in Hugging Face skips their language model's `LogitForm`. Engines apply it."""
_LOGITS_DIVIDED = frozenset(
    {"granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"}
)
"""Types whose logits are divided by `logits_scaling`. HyperCLOVA X multiplies by it."""


@dataclass(frozen=True)
class LogitForm:
    """What a model does with its head's output: `scale · logits`, or `softcap · tanh(scale · logits / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        scaled = logits * self.scale
        return scaled if self.softcap is None else soft_cap(scaled, self.softcap)


@dataclass(frozen=True)
class ModelPath:
    reason: str
    """Why the path is not packed, or empty."""

    @property
    def is_packed(self) -> bool:
        return not self.reason


def require_causal(folder: Path, key: str) -> Any:
    """Return a folder's Hugging Face config. Raises ConfigError, in one line, if the learner cannot train that type of
    model. Loads no weights."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, OSError) as error:
        raise ConfigError(f"{key} {folder} cannot be loaded: {first_line_of(error)}; use another model") from error
    require_text_decoder(config, folder, key)
    return config


def require_text_decoder(config: Any, folder: Path, key: str) -> None:
    """Raise ConfigError if a model with this Hugging Face `config` is not a decoder of text, and has none as a part."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    reason = ""
    has_parts = any(part in name for name in config.sub_configs for part in _OTHER_MODALITIES)
    if is_composite(config):
        reason = _NOT_ALONE.get(config.model_type, "")
        if config.model_type in _WITHOUT_LOGIT_FORM and logit_form_of(config) != LogitForm():
            reason = "whose logits are scaled or capped by engines, and not by Hugging Face's forward"
    elif has_parts:
        reason = "whose language model is not a part of its own"
    elif config.is_encoder_decoder:
        reason = "which has an encoder besides its decoder"
    elif config.model_type in _ENCODERS and not getattr(config, "is_decoder", False):
        reason = "whose tokens see the tokens after them"
    elif config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        reason = "which is not a causal language model"
    if reason:
        raise ConfigError(f"{key} {folder} is of type {config.model_type}, {reason}; use another model")


def is_composite(config: Any) -> bool:
    """Whether a model with this Hugging Face `config` has a language model and other parts."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    is_part = config.get_text_config() is not config and not config.is_encoder_decoder
    return is_part and config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES


def decoder_of(lm: Any) -> Any:
    """The backbone of a Hugging Face model on the packed path: embedding, layers and last norm, without the head."""
    if not is_composite(lm.config):
        return lm.model
    decoder = lm.get_decoder()
    return decoder if decoder.get_output_embeddings() is None else decoder.model


def require_parallel(config: Any, path: ModelPath, num_sharing: int, section: str = "learner.") -> None:
    """Raise ConfigError if `num_sharing` ranks cannot share the tokens of a sequence of this model. `section` is the
    part of the config that has `sequence_parallel`."""
    if num_sharing == 1:
        return
    reason = path.reason
    if path.is_packed and depends_on_length(config):
        reason = "its rotary embedding depends on the length of a sequence, of which a rank sees only a part"
    elif path.is_packed and is_recurrent(config):
        reason = (
            "its recurrent layers need the tokens of a sequence one after the other, of which a rank sees only a part"
        )
    if reason:
        raise ConfigError(f"{section}sequence_parallel must be 1 with a model of type {config.model_type}: {reason}")
    if (num_heads := config.get_text_config().num_attention_heads) % num_sharing:
        raise ConfigError(
            f"{section}sequence_parallel {num_sharing} must be a divisor of the model's {num_heads} attention heads"
        )


def path_of(config: Any) -> ModelPath:
    config, reason = config.get_text_config(), ""
    if config.model_type not in PACKED_TYPES:
        reason = f"type {config.model_type} is not known to be right on the packed path"
    elif others := _layer_types(config) - _PACKED_LAYERS:
        reason = f"layers of type {', '.join(sorted(others))} are not known to be right on the packed path"
    elif config.model_type == "llama4_text" and config.attn_temperature_tuning:
        reason = "its attention temperature depends on the place in the row"
    return ModelPath(reason)


def is_recurrent(config: Any) -> bool:
    """Whether a model with this Hugging Face `config` has layers that carry a state from token to token."""
    return bool(_layer_types(config.get_text_config()) & _RECURRENT_LAYERS)


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def logit_form_of(config: Any) -> LogitForm:
    """What a model on the packed path does with the output of its head."""
    config, scale = config.get_text_config(), 1.0
    if config.model_type in _LOGITS_DIVIDED:
        scale = 1 / config.logits_scaling
    elif config.model_type == "hyperclovax":
        scale = config.logits_scaling
    elif getattr(config, "logit_scale", None) is not None:  # Cohere
        scale = config.logit_scale
    elif config.model_type == "falcon_h1":
        scale = config.lm_head_multiplier
    cap = "logits_soft_cap" if config.model_type == "recurrent_gemma" else "final_logit_softcapping"
    return LogitForm(scale, getattr(config, cap, None))


# ── rotary embeddings that depend on a sequence's length ──
#
# Hugging Face chooses the frequencies of `dynamic` and `longrope` embeddings by the highest position of the whole row,
# and `dynamic` ones remember the longest row so far. Here a sequence gets what it would get alone.

_BY_LENGTH = frozenset({"dynamic", "longrope"})


def embed_each_sequence(lm: nn.Module) -> None:
    """Make rotary embeddings that depend on the length treat each packed sequence by itself, from position 0."""
    for module in lm.modules():
        if _kinds(module) & _BY_LENGTH:
            module.forward = partial(_by_sequence, module, module.forward)


def depends_on_length(config: Any) -> bool:
    """Whether a model with this Hugging Face `config` has a rotary embedding that depends on a sequence's length."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    of_layers = [each for each in rope.values() if isinstance(each, dict)]
    return any(each.get("rope_type") in _BY_LENGTH for each in (rope, *of_layers))


def _by_sequence(
    module: Any, forward: Callable[..., tuple[Tensor, Tensor]], x: Tensor, position_ids: Tensor, *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Call the `forward` of a rotary embedding once for each sequence of a packed row, as if it were the first."""
    starts = (position_ids[0] == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], position_ids.shape[1]]
    parts = []
    for start, end in zip(starts, ends, strict=True):
        _forget_longer_rows(module)
        parts.append(forward(x, position_ids[:, start:end], *args, **kwargs))
    cosines, sines = zip(*parts, strict=True)
    return torch.cat(cosines, dim=1), torch.cat(sines, dim=1)


def _forget_longer_rows(module: Any) -> None:
    """Undo what a `dynamic` embedding remembers of longer rows."""
    kept = getattr(module, "original_inv_freq", None)
    if kept is not None and "dynamic" in _kinds(module):
        module.inv_freq = kept.to(module.inv_freq.device)
        module.max_seq_len_cached = module.original_max_seq_len


def _kinds(module: Any) -> set[str]:
    """The kinds of a rotary embedding. A model may have one for each type of layer."""
    is_rotary = hasattr(module, "original_inv_freq") or type(module).__name__.endswith("RotaryEmbedding")
    kind = getattr(module, "rope_type", None) if is_rotary else None
    return set(kind.values()) if isinstance(kind, dict) else {kind} if isinstance(kind, str) else set()


# ── computing what the sequences of a group have in common once ──

_PADDED = frozenset({"phi"})
"""Packed types whose causal models are nevertheless padded, because of their heads."""


def prefix_sharing_roles(config: RunConfig) -> frozenset[str]:
    """Names of the roles with `learner.share_prefixes` whose models can do it. Reads their config.json alone."""
    learner = config.learner
    if not learner.share_prefixes:
        return frozenset()
    paths = {"policy": config.model.path, "reference": learner.reference.path or config.model.path}
    if learner.critic is not None:
        paths["critic"] = learner.critic.path or config.model.path
    return frozenset(role for role, path in paths.items() if _can_share(path))


def _can_share(folder: Path) -> bool:
    """Whether a model's tokens are the same computation in every sequence that begins with them."""
    try:
        config = require_causal(folder, "path")
    except ConfigError:
        return False  # its ranks refuse it, with the reason
    if is_recurrent(config):
        logger.info("learner.share_prefixes has no effect on %s: its recurrent layers take whole sequences", folder)
        return False
    return path_of(config).is_packed and not depends_on_length(config) and config.model_type not in _PADDED
