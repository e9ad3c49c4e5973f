"""Every architecture's log-probs and gradients against Hugging Face's own forward, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.errors import ConfigError
from penstock_learner.model import causal_lm, self_check
from penstock_learner.model.architectures import (
    LogitForm,
    path_of,
    require_causal,
    require_parallel,
    require_text_decoder,
)
from penstock_learner.model.attention import packed_attention as kernels
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.causal_lm import load_model
from penstock_learner.model.self_check import compare_with_plain, require_right
from support.tiny_architectures import (
    ARCHITECTURES,
    COMPOSITES,
    FAST,
    LENGTHS,
    REFUSED,
    UNTRIED,
    plain_log_probs,
    random_batch,
    tiny_config,
    tiny_model,
)
from support.tiny_models import load_scalar_model

CPU = torch.device("cpu")


def _cases() -> list[object]:
    names = [*ARCHITECTURES, *COMPOSITES]
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # in GPT BigCode
@pytest.mark.parametrize("name", _cases())
def test_log_probs_and_gradients_are_those_of_the_plain_forward(name: str, tmp_path: Path) -> None:
    model, batch = tiny_model(name), random_batch()
    model.save_pretrained(tmp_path)
    wanted = plain_log_probs(model, batch)
    wanted.sum().backward()
    own = load_model(tmp_path, torch.float32, chunk_tokens=16)
    log_probs, _ = own(ModelInputs.of(batch, CPU))
    log_probs.sum().backward()
    assert float((log_probs - wanted).detach().abs().max()) < 1e-4
    gradients = {name: parameter.grad for name, parameter in own.lm.named_parameters()}
    # Some gradients are zero by their mathematics, such as those of keys' biases: only rounding of the others is left.
    largest = max(float(parameter.grad.abs().max()) for parameter in model.parameters() if parameter.grad is not None)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            allowed = 1e-3 * float(parameter.grad.abs().max()) + 1e-6 * max(1.0, largest)
            assert float((gradients[name] - parameter.grad).abs().max()) <= allowed, name


@pytest.mark.parametrize(
    "name", ["mistral", "gemma2, wide head", "gpt_oss", "llama, dynamic rope", "qwen3_next", "gemma3", "qwen3_vl"]
)
def test_a_right_model_passes_its_self_check(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    check = compare_with_plain(load_model(tmp_path, torch.float32, 16), "model.path", CPU, torch.float32)
    assert check.ok and check.error < 1e-4 and check.longest > 8


def test_a_tiny_model_is_the_same_whatever_was_drawn_before() -> None:
    first = tiny_model("qwen3_next").state_dict()
    torch.rand(1)
    again = tiny_model("qwen3_next").state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())


def _drop(monkeypatch: pytest.MonkeyPatch, **dropped: object) -> None:
    """Make attention ignore a part of the scores' form."""
    from dataclasses import replace

    kept = kernels.attend
    monkeypatch.setattr(
        "penstock_learner.model.attention.packed_attention.attend",
        lambda q, k, v, packing, form: kept(q, k, v, packing, replace(form, **dropped)),
    )


@pytest.mark.parametrize(
    ("name", "dropped"),
    [("mistral", "window"), ("gpt_oss", "sinks"), ("gemma2, wide head", "softcap"), ("granite, scaled", "scale")],
)
def test_the_self_check_refuses_attention_that_ignores_a_part(
    name: str, dropped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, 16)
    _drop(monkeypatch, **{dropped: None})
    with pytest.raises(ConfigError, match=r"on the packed path differs from Hugging Face's own forward by \d"):
        require_right(model, "model.path", CPU, torch.float32)


@pytest.mark.parametrize("name", ["cohere, scaled", "granite, scaled", "gemma2, wide head"])
def test_the_self_check_refuses_a_head_without_its_scale_or_cap(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, 16)
    model.logit_form = LogitForm()
    assert not compare_with_plain(model, "model.path", CPU, torch.float32).ok


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("can't allocate memory: 9")]
)
def test_a_self_check_without_memory_says_so(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    tiny_model("llama").save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, 16)
    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(ConfigError, match="cpu is out of memory in the first forward pass .*; use more ranks"):
        require_right(model, "model.path", CPU, torch.float32)


@pytest.mark.parametrize(
    "name", ["llama, dynamic rope", "phi3, longrope", "jamba", "qwen3_next", "lfm2, convolutions", "recurrent_gemma"]
)
def test_models_whose_sequences_cannot_be_shared_are_refused(name: str) -> None:
    config = tiny_config(name)
    require_parallel(config, path_of(config), 1)
    with pytest.raises(ConfigError, match=r"learner.sequence_parallel must be 1 with a model of type \w+: "):
        require_parallel(config, path_of(config), 2)
    shared = tiny_config("llama")
    require_parallel(shared, path_of(shared), 2)


def test_types_that_cannot_be_trained_are_refused_in_one_line(tmp_path: Path) -> None:
    from transformers import AutoConfig

    ways_in: tuple[Callable[[Path], object], ...] = (
        lambda folder: require_causal(folder, "model.path"),  # --check
        lambda folder: load_model(folder, torch.float32, 16),  # policy, reference, sft, check-model
        lambda folder: load_scalar_model(folder, torch.float32, key="model.path", make_head=True),  # critic
    )
    for model_type in REFUSED:
        folder = tmp_path / model_type
        AutoConfig.for_model(model_type).save_pretrained(folder)
        for way_in in ways_in:
            with pytest.raises(ConfigError) as raised:
                way_in(folder)
            text = str(raised.value)
            assert f"is of type {model_type}, wh" in text and "use another model" in text, text
            assert "\n" not in text


def test_every_type_of_hugging_face_with_other_parts_is_compared_or_refused() -> None:
    """The next composite model must not be trained before somebody looked at it."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as COMPOSITE

    same = {"glmga": "glm46v", "pp_chart2table": "got_ocr2", "shieldgemma2": "gemma3"}
    text_only = {"mistral4"}  # listed there, although it has no part that sees
    for model_type in sorted(COMPOSITE.keys() - text_only - UNTRIED - COMPOSITES.keys() - same.keys()):
        try:
            config = AutoConfig.for_model(model_type)
        except (TypeError, ValueError, ImportError):  # it has no default sizes
            continue
        with pytest.raises(ConfigError, match=f"is of type {config.model_type}, wh"):
            require_text_decoder(config, Path("folder"), "model.path")


def test_a_scale_of_logits_that_only_engines_apply_is_refused() -> None:
    config = tiny_config("granite_speech")
    require_text_decoder(config, Path("folder"), "model.path")
    config.text_config.logits_scaling = 4.0
    with pytest.raises(ConfigError, match="whose logits are scaled or capped by engines, and not by Hugging Face"):
        require_text_decoder(config, Path("folder"), "model.path")


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_sections_of_a_rotary_embedding_are_the_ordinary_one_for_text(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    rotary, ordinary = model.model.language_model.rotary_emb, tiny_model("llama").model.rotary_emb
    positions, hidden = torch.arange(50).unsqueeze(0), torch.zeros(1, 50, 32)
    cosines, sines = rotary(hidden, positions.expand(3, 1, 50))
    ordinary.inv_freq = rotary.inv_freq
    wanted = ordinary(hidden, positions)
    width = cosines.shape[-1]
    for found, one in zip((cosines, sines), wanted, strict=True):
        sections = found if found.dim() == 4 else found.unsqueeze(0)  # of Qwen2.5-VL attention takes a part of each
        assert all(torch.equal(section, one[..., :width]) for section in sections)


def test_sequences_are_longer_than_every_limit() -> None:
    """What an architecture does beyond a window or a number of chosen tokens would not be compared otherwise."""
    never_reached = {"doge", "mistral, long window"}  # Doge has as many positions
    for name in [*ARCHITECTURES, *COMPOSITES]:
        text = tiny_config(name).get_text_config()
        limits = {limit: getattr(text, limit, None) for limit in self_check.LIMITS}
        if name not in never_reached:
            assert not {limit: size for limit, size in limits.items() if size and size >= max(LENGTHS)}, name


def test_chosen_tokens_that_tie_are_refused(tmp_path: Path) -> None:
    """With few index heads scores tie at zero, and Hugging Face chooses among them by the length of the row."""
    tiny_model("deepseek_v32", index_n_heads=4).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="deepseek_v32 on the padded path differs"):
        require_right(load_model(tmp_path, torch.float32, 16), "model.path", CPU, torch.float32)


def test_the_self_check_refuses_a_model_whose_tokens_see_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import BertConfig, BertLMHeadModel

    monkeypatch.setattr(causal_lm, "require_text_decoder", lambda *_: None)
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 48}  # fmt: skip
    for is_decoder in (True, False):
        model = BertLMHeadModel(BertConfig(**sizes, is_decoder=is_decoder))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)  # as it is made, it hardly looks at any token
        model.save_pretrained(tmp_path / ("causal" if is_decoder else "seeing"))
    require_right(load_model(tmp_path / "causal", torch.float32, 16), "model.path", CPU, torch.float32)
    with pytest.raises(ConfigError, match="tokens of bert see the tokens after them"):
        require_right(load_model(tmp_path / "seeing", torch.float32, 16), "model.path", CPU, torch.float32)


def test_what_is_not_a_causal_model_is_refused_in_one_line(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config(d_model=16, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    for refuse in (lambda: require_causal(tmp_path, "model.path"), lambda: load_model(tmp_path, torch.float32, 16)):
        with pytest.raises(ConfigError) as raised:
            refuse()
        assert "t5" in str(raised.value).lower() and "\n" not in str(raised.value)
