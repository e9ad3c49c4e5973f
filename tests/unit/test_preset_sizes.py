"""The presets have the sizes of real runs, and fit on the GPUs that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.config.gpu_bundles import num_gpus
from penstock.config.loading import load_config
from penstock.hub import is_hub_id
from penstock.start_checks import check_lengths
from penstock_tools.sizing.hardware import GPUS
from penstock_tools.sizing.plan import memory_of
from penstock_tools.starter import ALGORITHMS, Answers, starter_config

PRESETS = Path(__file__).parents[2] / "examples" / "presets"
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
"""config.json of the 7B models that the presets train."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_preset_names_its_gpus_and_fits_on_them(name: str, tmp_path: Path) -> None:
    file = PRESETS / f"{name}.yaml"
    header = re.search(
        r"^# GPUs: (\d+) x (\w+) 80 GB, (\d+) for engines and (\d+) for training", file.read_text(), re.M
    )
    assert header is not None, "the header names the number and the model of the GPUs"
    count, gpu, engines, training = int(header[1]), GPUS[header[2].lower()], int(header[3]), int(header[4])
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    config = load_config(file, ["--model.path", str(tmp_path)])
    assert config.rollout.num_servers * config.rollout.engine.tensor_parallel_size == engines
    assert num_gpus(config.learner.placement, config.learner.needed_roles) == training == count - engines
    for group in memory_of(config, gpu):
        assert group.fits, f"{group.num_bytes / 1e9:.0f} GB for {[role.role for role in group.plans]}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_preset_has_the_sizes_of_a_real_run(name: str) -> None:
    config = load_config(PRESETS / f"{name}.yaml")
    assert is_hub_id(config.model.path) and config.model.dtype == "bfloat16"
    assert 1e-7 <= config.learner.lr <= 5e-6
    assert config.replay.groups_per_step * config.dataset.num_samples >= 1024, "samples of a step"
    assert config.dataset.max_tokens >= 512 and config.dataset.validation.file is not None
    longest = (config.rollout.prompt.max_tokens or 0) + config.dataset.max_tokens
    assert longest <= config.rollout.engine.max_model_len
    assert longest <= config.learner.micro_batch_tokens, "the longest sample fits into a micro-batch"
    check_lengths(config)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_init_writes_the_sizes_of_the_preset(name: str, tmp_path: Path) -> None:
    preset = load_config(PRESETS / f"{name}.yaml")
    longest = preset.dataset.max_tokens
    answers = Answers("r", "org/model", "data.parquet", algorithm=name, gpus=8, max_tokens=longest)
    (tmp_path / "run.yaml").write_text(starter_config(answers, "run.yaml"))
    made = load_config(tmp_path / "run.yaml")
    assert made.replay.groups_per_step == preset.replay.groups_per_step
    for field in ("lr", "weight_decay", "warmup_steps"):
        assert getattr(made.learner, field) == getattr(preset.learner, field)
    critics = made.learner.critic, preset.learner.critic
    assert all(critics) == any(critics)
