"""What `--check` knows about a model from its config.json is what building the model says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.weights.folder_tensors import tensor_shapes
from penstock_learner.model.architectures import PACKED_TYPES, depends_on_length, path_of, require_causal
from penstock_learner.model.plain_layouts import PLAIN_TYPES, is_plain, plain_shapes
from penstock_learner.model.published_layout import model_without_weights, own_tensors, published_shapes

DEMO_MODEL = Path(__file__).parents[4] / "examples" / "arithmetic" / "model"
SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 40, "head_dim": 6,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def saved_model(folder: Path, kind: str, **settings: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **SIZES | settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("settings", [
    {}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True},
    {"max_position_embeddings": 512, "rope_parameters": LLAMA3},
], ids=["default", "tied", "biases", "llama3"])  # fmt: skip
@pytest.mark.parametrize("kind", PLAIN_TYPES)
def test_a_plain_model_has_the_tensors_of_its_config(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    folder = saved_model(tmp_path, kind, **settings)
    config = json.loads((folder / "config.json").read_text())
    lm = model_without_weights(folder)
    built = published_shapes(lm, own_tensors(lm))
    assert plain_shapes(config) == built == tensor_shapes(folder)
    known = require_causal(folder, "model.path")
    assert path_of(known).is_packed and not depends_on_length(known)
    assert is_plain(folder)


@pytest.mark.parametrize(("name", "value"), [
    ("intermediate_size", 25), ("num_hidden_layers", 1), ("num_key_value_heads", 4), ("vocab_size", 41),
    ("hidden_size", "16"), ("hidden_act", "gelu"), ("model_type", "gemma"),
    ("quantization_config", {"quant_method": "fp8"}), ("auto_map", {"AutoConfig": "own.py"}),
    ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0}), ("layer_types", ["full_attention"]),
    ("head_dim", None), ("num_attention_heads", 0),
])  # fmt: skip
def test_any_other_model_is_not_plain(tmp_path: Path, name: str, value: Any) -> None:
    folder = saved_model(tmp_path, "qwen3")
    assert is_plain(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    assert not is_plain(folder)


def test_a_folder_that_cannot_be_read_is_not_plain(tmp_path: Path) -> None:
    assert not is_plain(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert not is_plain(tmp_path)


def test_plain_types_are_packed() -> None:
    assert set(PLAIN_TYPES) <= PACKED_TYPES


def test_the_check_of_a_plain_model_imports_no_heavy_library(tmp_path: Path) -> None:
    """Importing torch and transformers would take most of the time of `penstock up --check`."""
    code = (
        "import sys\n"
        "from penstock.config.loading import validate\n"
        "from penstock_learner.start_check import check\n"
        f"config = validate({{'model': {{'path': {str(DEMO_MODEL)!r}}}, 'run_dir': {str(tmp_path)!r}, "
        "'redis': {'url': 'redis://127.0.0.1:1'}}, 'test')\n"
        "print(check(config), sorted({'torch', 'transformers', 'ray'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "from the model folder []"
