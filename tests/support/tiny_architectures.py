"""Tiny random models of every architecture that the learner is compared on.

    name = "gemma2"                      a model type of Hugging Face, with small sizes
    name = "qwen2, sliding window"       the same with settings that change the result

Windows are 8 tokens, shorter than the sequences that tests use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.tiny_models import EOS_TOKEN_ID, write_tokenizer

VOCAB_SIZE = 96
WINDOW = 8
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "sliding_window": WINDOW, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "shared_expert_intermediate_size": 16,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_chunk_size": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256,
    "n_inner": 48, "ffn_dim": 48, "d_model": 32, "n_heads": 4, "n_layers": 4, "state_size": 8,
}  # fmt: skip
"""Sizes by the names that configurations have for them. A configuration gets those that it knows."""

_OTHER_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "depth": 2, "num_heads": 4, "embed_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4, "image_size": 28, "patch_size": 14, "out_hidden_size": 32,
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
}  # fmt: skip
"""Sizes of the parts of a composite model besides its language model."""

_SLIDING = ["sliding_attention", "full_attention"] * 2
_MLA = {"num_key_value_heads": 4, "first_k_dense_replace": 1}
_INDEXED = {**_MLA, "index_topk": WINDOW, "index_head_dim": 16, "index_n_heads": 64}
_MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8}
_PER_LAYER = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8, "layer_types": _SLIDING}
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
_LOCAL = {"window_size": WINDOW}
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, "factor": 4.0,
    "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 5.0],
}  # fmt: skip

_SAME_NAME = """
    afmoe apertus arcee aria_text bamba bitnet bloom cohere cohere2 cohere2_moe ctrl cwm diffllama ernie4_5
    ernie4_5_moe exaone4 exaone_moe falcon_mamba flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode
    gpt_neox gpt_neox_japanese gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared
    helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jamba jetmoe laguna lfm2 llama mamba mellum
    mimo_v2_flash minimax_m2 ministral ministral3 mistral mixtral mpt nanochat olmo olmo2 olmo3
    olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_5_moe_text
    qwen3_moe qwen3_next recurrent_gemma rwkv seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm biogpt
    doge inkling_text hrm_text
"""
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in _SAME_NAME.split()},
    "deepseek_v4": ("deepseek_v4", {"index_topk": WINDOW}),
    "minimax": ("minimax", {"block_size": WINDOW}),
    "minimax_m3_vl_text": ("minimax_m3_vl_text", {"index_block_size": 4, "index_topk_blocks": 2}),
    "deepseek_v2": ("deepseek_v2", {**_MLA, "num_experts_per_tok": 2}),
    "deepseek_v3": ("deepseek_v3", _MLA),
    "glm4_moe_lite": ("glm4_moe_lite", _MLA),
    "minicpm3": ("minicpm3", _MLA),
    "youtu": ("youtu", _MLA),
    "dots1": (
        "dots1",
        {"first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    ),
    "falcon": ("falcon", {"head_dim": None}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "codegen": ("codegen", {"rotary_dim": 8}),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_heads": 4, **_LOCAL}),
    "nemotron": ("nemotron", {"head_dim": 8, "num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "lfm2_moe": ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 2}),
    "lfm2, convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "llama4_text": (
        "llama4_text",
        {"attention_chunk_size": WINDOW, "attn_temperature_tuning": False, "intermediate_size_mlp": 48},
    ),
    "llama4_text, temperature": (
        "llama4_text",
        {
            "attention_chunk_size": WINDOW,
            "attn_temperature_tuning": True,
            "floor_scale": 4,
            "intermediate_size_mlp": 48,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0, "key_multiplier": 0.5},
    ),
    "falcon_h1, norm": ("falcon_h1", {"mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_n_groups": 2}),
    "bamba, attention": ("bamba", {"attn_layer_indices": [1, 3]}),
    "granitemoehybrid, attention": (
        "granitemoehybrid",
        {"layer_types": ["linear_attention", "full_attention"] * 2, "logits_scaling": 4.0},
    ),
    "nemotron_h": ("nemotron_h", _MAMBA | {"chunk_size": WINDOW}),
    "nemotron_h, groups": ("nemotron_h", _MAMBA | {"n_groups": 2}),
    "olmo_hybrid, negative eigenvalues": ("olmo_hybrid", {"linear_allow_neg_eigval": True}),
    "kimi_linear": (
        "kimi_linear",
        {
            "num_key_value_heads": 4,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense", *["sparse"] * 3],
        },
    ),
    "gemma3n_text": (
        "gemma3n_text",
        {**_PER_LAYER, "num_kv_shared_layers": 2, "laurel_rank": 8, "final_logit_softcapping": 3.0},
    ),
    "gemma4_text": ("gemma4_text", {**_PER_LAYER, "global_head_dim": 16, "final_logit_softcapping": 3.0}),
    "gemma4_text, shared keys": ("gemma4_text", {**_PER_LAYER, "global_head_dim": 16, "num_kv_shared_layers": 2}),
    "gemma4_text, experts": (
        "gemma4_text",
        {
            **_PER_LAYER,
            "global_head_dim": 16,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}),
    "zamba2": (
        "zamba2",
        {
            "n_mamba_heads": 8,
            "chunk_size": 8,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "adapter_rank": 8,
        },
    ),
    "dbrx": (
        "dbrx",
        {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
            "max_seq_len": 256,
        },
    ),
    "deepseek_v32": ("deepseek_v32", _INDEXED),
    "glm_moe_dsa": ("glm_moe_dsa", _INDEXED),
    "hy_v4": ("hy_v4", _INDEXED),
    "axk2": ("axk2", _INDEXED),
    "axk1": ("axk1", _MLA),
    "modernbert-decoder": ("modernbert-decoder", {"local_attention": WINDOW, "cls_token_id": 1, "sep_token_id": 2}),
    "longcat_flash": (
        "longcat_flash",
        {
            "num_layers": 2,
            "num_key_value_heads": 4,
            "moe_topk": 2,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 16,
            "ffn_hidden_size": 48,
        },
    ),
    "zaya": ("zaya", {"num_experts_per_tok": 1, "router_hidden_size": 16}),
    "xlstm": ("xlstm", {"num_heads": 4, "chunk_size": 8, "autocast_kernel_dtype": "float32"}),
    "gemma2, wide head": ("gemma2", {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "gemma3_text, capped": ("gemma3_text", {"layer_types": _SLIDING}),
    "granite, scaled": (
        "granite",
        {"logits_scaling": 4.0, "attention_multiplier": 0.5, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    ),
    "granitemoe, scaled": ("granitemoe", {"logits_scaling": 4.0}),
    "hyperclovax, scaled": ("hyperclovax", {"logits_scaling": 0.25}),
    "cohere, scaled": ("cohere", {"logit_scale": 0.25}),
    "cohere2, windows": ("cohere2", {"layer_types": _SLIDING}),
    "qwen2, sliding window": ("qwen2", {"use_sliding_window": True, "layer_types": _SLIDING, "sliding_window": WINDOW}),
    "qwen3, sliding window": ("qwen3", {"use_sliding_window": True, "layer_types": _SLIDING, "sliding_window": WINDOW}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, long window": ("mistral", {"sliding_window": 1000}),
    "phi3, no window": ("phi3", {"sliding_window": None}),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": _LONG, "sliding_window": None, "original_max_position_embeddings": 16},
    ),
    "llama, dynamic rope": ("llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 16}),
    "llama, yarn": ("llama", {"rope_parameters": _YARN}),
    "llama, llama3 rope": ("llama", {"rope_parameters": _LLAMA3}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2_moe, windows": ("qwen2_moe", {"use_sliding_window": True, "layer_types": _SLIDING}),
    "olmo3, windows": ("olmo3", {"layer_types": _SLIDING}),
    "exaone4, windows": ("exaone4", {"layer_types": _SLIDING}),
    "starcoder2, window": ("starcoder2", {"use_bias": True}),
    "smollm3, no rope": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
}
"""Model type and settings by name."""

_COMPOSITES = """
    aria deepseek_vl ernie4_5_vl_moe exaone4_5 fun_asr_nano fuyu gemma3 gemma4 gemma4_unified glm46v glm4v glm4v_moe
    glm5_next glm_ocr glmasr got_ocr2 granite_speech granite_speech_plus hunyuan_vl hyperclovax_vision_v2 idefics2
    idefics3 internvl janus kimi_k25 kosmos-2.5 lfm2_vl lighton_ocr llama4 llava llava_next llava_next_video
    llava_onevision minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 muse_glimmer nemotron_h_omni ovis2 paddleocr_vl
    paligemma qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr qwen3_vl qwen3_vl_moe qwen4_exp smolvlm
    step3p7 video_llama_3 video_llava vipllava voxtral
"""


def _sections(*sizes: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sizes)}}


_WITH_SECTIONS = "glm46v glm4v glm_ocr hunyuan_vl paddleocr_vl qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe"
_BLOCKS = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 2, "ngram_vocab_size_base": 50, "split_ngram_parts": 1, "hc_lowrank": 8,
}  # fmt: skip
_OF_COMPOSITES: dict[str, dict[str, dict[str, Any]]] = {
    **{name: {"text_config": _sections(2, 1, 1)} for name in _WITH_SECTIONS.split()},
    "glm4v_moe": {"text_config": _sections(1, 1, 0)},
    "ernie4_5_vl_moe": {"text_config": {**_sections(1, 1, 2), "moe_intermediate_size": [16, 16]}},
    "glm5_next": {"text_config": {**_INDEXED, "index_kpool": 2, "qk_rope_head_dim": 0}},
    "minimax_m3_vl": {"text_config": {"index_block_size": 4, "index_topk_blocks": 2}},
    "qwen4_exp": {"text_config": _BLOCKS},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "step3p7": {"text_config": {"layer_types": _SLIDING, "sliding_window": WINDOW}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
}
COMPOSITES: dict[str, dict[str, dict[str, Any]]] = {name: _OF_COMPOSITES.get(name, {}) for name in _COMPOSITES.split()}
"""Settings of the nested configurations of models that see or hear besides, by model type."""

_UNTRIED = """
    cohere_compass deepseek_ocr2 deepseek_vl_hybrid emu3 fast_vlm gemma3n granite4_vision inkling_mm_model
    perception_lm qwen2_5_omni_thinker qwen3_omni_moe_thinker vibevoice_asr
"""
UNTRIED = frozenset(_UNTRIED.split())
"""Composite types without a tiny model, which the self-check judges. fast_vlm, gemma3n and perception_lm need timm and
torchvision, inkling_mm_model needs scipy, and the thinkers a setting that only the whole model's config has. The parts
of the others need sizes that fit each other, or are large whatever the config says."""
_REFUSED = """
    aya_vision blip blip-2 chameleon cohere2_vision cosmos3_edge cosmos3_omni diffusion_gemma git instructblip
    instructblipvideo kosmos-2 mllama moshi phi4_multimodal qwen2_5_omni qwen2_audio voxtral_realtime bart t5 whisper
    bert electra roberta xlnet
"""
REFUSED = tuple(_REFUSED.split())
"""Model types that are refused: models without a language model that can be trained alone, encoder-decoders, and models
whose tokens see later tokens."""
FAST = {
    "llama", "qwen3, sliding window", "mistral", "gemma2, wide head", "gpt_oss", "llama4_text", "cohere, scaled",
    "granite, scaled", "phi3, longrope", "llama, dynamic rope", "qwen2_moe, windows", "deepseek_v3", "qwen3_next",
    "lfm2, convolutions", "jamba", "gpt2", "phi", "gemma3", "llama4", "qwen3_5", "qwen3_vl",
}  # fmt: skip
"""One of each kind. The others are compared in the long tests."""


def tiny_config(name: str, **larger: Any) -> Any:
    """The Hugging Face configuration of one of the architectures. Sizes in `larger` replace the tiny ones."""
    from transformers import AutoConfig

    if name in COMPOSITES:
        return _tiny_composite(name, **larger)
    model_type, settings = ARCHITECTURES[name]
    return _tiny(type(AutoConfig.for_model(model_type)), _SIZES, settings | larger)


def _tiny_composite(name: str, **larger: Any) -> Any:
    from transformers import AutoConfig

    default, nested = AutoConfig.for_model(name), {}
    for part in default.sub_configs:
        settings = COMPOSITES[name].get(part, {})
        other = settings.get("model_type")
        kind = type(AutoConfig.for_model(other) if other else getattr(default, part))
        if part == "text_config":
            own = ARCHITECTURES.get(kind.model_type, ("", {}))[1]
            nested[part] = _tiny(kind, _SIZES, own | settings | larger)
        elif kind is not type(None):
            nested[part] = _tiny(kind, _OTHER_SIZES, settings)
    return type(default)(**nested)


def _tiny(kind: Any, of_all: dict[str, Any], settings: dict[str, Any]) -> Any:
    known = vars(kind())
    sizes = {
        key: value
        for key, value in of_all.items()
        if known.get(key) is not None or key in kind.attribute_map or (key == "head_dim" and key in known)
    }
    chosen = {key: value for key, value in (sizes | settings).items() if value is not None or key == "sliding_window"}
    return kind(**chosen)


def tiny_model(name: str, seed: int = 0, **larger: Any) -> Any:
    """A random model, whose distributions are far from uniform."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    kind = AutoModelForMultimodalLM if name in COMPOSITES else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # parameters of one dimension keep a part of the values that they begin with
        model = kind.from_config(tiny_config(name, **larger), attn_implementation="eager")
    return with_random_weights(model, seed)


def with_random_weights(model: Any, seed: int) -> Any:
    import torch

    model = model.float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
            else:
                parameter.add_(noise * 0.1)
    return model


LENGTHS = (5, 40, 23, 33)
"""Tokens of the sequences that are compared. Most are longer than every window."""
_PROMPT_LENGTHS = (2, 3, 4, 1)
_TEMPERATURES = (1.0, 0.7, 1.3, 1.0)


def random_batch() -> Any:
    """A `SequenceBatch` of random tokens, with a temperature for each sequence."""
    import numpy as np

    from penstock_learner.batches.sequence_batch import SequenceBatch

    num_responses = sum(LENGTHS) - sum(_PROMPT_LENGTHS)
    return SequenceBatch(
        token_ids=np.random.default_rng(0).integers(3, VOCAB_SIZE, sum(LENGTHS)),
        lengths=np.array(LENGTHS),
        prompt_lengths=np.array(_PROMPT_LENGTHS),
        rewards=np.zeros(len(LENGTHS), dtype=np.float32),
        group_ids=np.arange(len(LENGTHS)),
        loss_mask=np.ones(num_responses, dtype=np.uint8),
        behaviour_log_probs=np.zeros(num_responses, dtype=np.float32),
        token_versions=np.zeros(num_responses, dtype=np.int64),
        temperatures=np.repeat(np.array(_TEMPERATURES, dtype=np.float32), np.subtract(LENGTHS, _PROMPT_LENGTHS)),
    )


def plain_log_probs(model: Any, batch: Any) -> Any:
    """Log-probs of the response tokens by Hugging Face's forward, each sequence by itself."""
    import torch

    results, start = [], 0
    temperatures = torch.as_tensor(batch.temperatures).split(batch.response_lengths.tolist())
    for length, prompt, temperature in zip(batch.lengths, batch.prompt_lengths, temperatures, strict=True):
        ids = torch.as_tensor(batch.token_ids[start : start + length]).unsqueeze(0)
        start += length
        _forget_lengths(model)
        logits = model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : length - 1].float()
        log_probs = (logits / temperature.unsqueeze(1)).log_softmax(dim=1)
        results.append(log_probs.gather(1, ids[0, prompt:].unsqueeze(1)).squeeze(1))
    return torch.cat(results)


def _forget_lengths(model: Any) -> None:
    """A dynamic rotary embedding remembers the longest sequence that it saw."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.inv_freq = module.original_inv_freq
            module.max_seq_len_cached = module.original_max_seq_len


_EXPERT_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
    "eos_token_id": EOS_TOKEN_ID, "bos_token_id": 0, "sliding_window": None,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "head_dim": None, "first_k_dense_replace": 1, "topk_method": "noaux_tc",
}  # fmt: skip
"""The sizes of DeepSeek's latent attention that GPU kernels are built for."""
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "mixtral": {"moe_intermediate_size": None},
    "gpt_oss": {"head_dim": 64, "moe_intermediate_size": None, "sliding_window": 128},
    "glm4_moe": {"first_k_dense_replace": 1},
    "deepseek_v3": _LATENT | {"scoring_func": "sigmoid"},
}


def write_tiny_experts(name: str, folder: Path, dtype: str = "float32", seed: int = 0) -> None:
    """Write a random mixture of experts with a tokenizer of one word per token."""
    import torch

    model = tiny_model(name, seed, **(_EXPERT_SIZES | SETTINGS[name]))
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder, VOCAB_SIZE)
