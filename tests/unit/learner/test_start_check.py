"""`penstock learner --check` refuses models that the learner cannot train, by the key of the config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.loading import validate
from penstock.errors import ConfigError, Unavailable
from penstock_learner import start_check
from penstock_learner.start_check import check

MODEL = Path(__file__).parents[3] / "examples" / "arithmetic" / "model"


def _config(tmp_path: Path, model: Path, critic: Path | None) -> Any:
    return validate(
        {
            "model": {"path": str(model)},
            "run_dir": str(tmp_path / "runs"),
            "redis": {"url": "redis://127.0.0.1:1/0"},
            "learner": {
                "algorithm": {"advantage": {"name": "gae"}},
                "critic": {"path": str(critic) if critic else None},
            },
        },
        "test",
    )


@pytest.fixture
def vision_folder(tmp_path: Path) -> Path:
    from transformers import AutoConfig

    AutoConfig.for_model("mllama").save_pretrained(tmp_path / "vision")
    return tmp_path / "vision"


def test_the_check_names_the_role_whose_model_has_layers_for_images(tmp_path: Path, vision_folder: Path) -> None:
    assert "from the model folder" in check(_config(tmp_path, MODEL, None))
    for model, critic, key in ((vision_folder, None, "model.path"), (MODEL, vision_folder, "learner.critic.path")):
        with pytest.raises(
            ConfigError, match=rf"{key} \S+vision is of type mllama, whose layers for images stand between"
        ):
            check(_config(tmp_path, model, critic))


def test_the_check_names_a_type_that_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "from_the_future"}))
    with pytest.raises(ConfigError, match=r"model.path \S+ cannot be loaded: .*from_the_future") as raised:
        check(_config(tmp_path, tmp_path, None))
    assert "\n" not in str(raised.value)


def test_the_check_says_that_the_ray_cluster_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path, MODEL, None).changed({"learner.ray_address": "127.0.0.1:1"})
    monkeypatch.setattr(start_check, "REACH_S", 0.1)
    with pytest.raises(Unavailable, match=r"^nothing listens at learner.ray_address 127.0.0.1:1; start Ray there"):
        check(config)


def test_the_check_looks_for_the_ray_cluster_that_ray_would_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tmp_path, MODEL, None).changed({"learner.ray_address": "auto"})
    monkeypatch.setattr(start_check, "REACH_S", 0.1)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)  # others may run on this machine
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="is auto, but no node .*; run `ray start --address=HOST:PORT` here"):
        check(config)
    assert check(config, with_ray=False) == "from the model folder"
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"^nothing listens at learner.ray_address 127.0.0.1:1; start Ray there"):
        check(config)


def test_what_needs_no_torch_is_checked_before_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_learner.start_check._check_structure", lambda _: pytest.fail("it imports torch"))
    with pytest.raises(ConfigError, match=r"learner.critic.path \S+ is not a model folder"):
        check(_config(tmp_path, MODEL, tmp_path / "nowhere"))
    monkeypatch.setattr("penstock_learner.loggers.step_loggers.find_spec", lambda _: None)
    config = _config(tmp_path, MODEL, None).changed({"learner.loggers": ("wandb",)})
    with pytest.raises(ConfigError, match="learner.loggers has wandb"):
        check(config)
    config = _config(tmp_path, MODEL, None).changed({"learner.checkpoint.resume": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match=r"learner.checkpoint.resume: \S+ is not a checkpoint's folder"):
        check(config)
    monkeypatch.setattr(start_check, "REACH_S", 0.1)
    with pytest.raises(Unavailable, match="nothing listens at learner.ray_address"):
        check(_config(tmp_path, MODEL, None).changed({"learner.ray_address": "127.0.0.1:1"}))
