"""Mistakes in a configuration are explained in plain words, whatever the field and the value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.loading import load_config, paths_of, validate
from penstock.config.run import RunConfig
from penstock.errors import ConfigError

WRONG_VALUES = ("abc", -1, -1.5, [1], {"x": 1}, None, float("nan"), "", ["a", "b", "c", "d"])
PYDANTIC = ("Input", "valid ", "pydantic", "Value error", "Field required", "type=", "class ", "instance", "to parse")


def config_with(path: str, value: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"model": {"path": "x"}}
    *sections, key = path.split(".")
    inner = data
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    return data


def test_every_field_is_explained_in_plain_words() -> None:
    explained = 0
    for index, path in enumerate(sorted(set(paths_of(RunConfig)))):
        for value in (WRONG_VALUES * 2)[index % len(WRONG_VALUES) :][:3]:
            try:
                validate(config_with(path, value), "run.yaml")
            except ConfigError as error:
                explained += 1
                for line in str(error).splitlines():
                    assert line.startswith("run.yaml: "), line
                    assert not any(word in line.replace(path, "") for word in PYDANTIC), (path, value, line)
                    assert "^" not in line and "[type" not in line, (path, value, line)
    assert explained > 300


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"learner": {"lr": "fast"}}, "learner.lr: must be a number, not 'fast'"),
        ({"learner": {"num_steps": 1.5}}, "learner.num_steps: must be a whole number, not 1.5"),
        ({"gateway": {"port": 70000}}, "gateway.port: must be at most 65535, not 70000"),
        ({"replay": {"lease_ttl_s": 0}}, "replay.lease_ttl_s: must be above 0, not 0"),
        ({"learner": {"compile": "maybe"}}, "learner.compile: must be true or false, not 'maybe'"),
        ({"learner": {"lr_schedule": "cosin"}}, "learner.lr_schedule: must be constant, linear or cosine, not 'cosin'; "
         "did you mean 'cosine'?"),
        ({"learner": {"loggers": ["consol"]}}, "learner.loggers[0]: must be console, jsonl, tensorboard or wandb, not "
         "'consol'; did you mean 'console'?"),
        ({"learner": 3}, "learner: must be a section with keys, not 3"),
        ({"learner": {"betas": 0.9}}, "learner.betas: must be a list, not 0.9"),
        ({"learner": {"lr": None}}, "learner.lr: must be a number, not empty"),
        ({"learner": {"lora": {"alpha": 8}}}, "learner.lora.rank is missing; give a whole number"),
        ({"rollout": {"reward": {"default": {"kind": "mth"}}}}, "rollout.reward.default: must be of kind "),
        ({"rollout": {"reward": {"default": {"kind": "mth"}}}}, "not {'kind': 'mth'}; did you mean 'math'?"),
        ({"rollout": {"reward": {"by_data_source": {"a/b": {"kind": "math", "wrong": 1}}}}},
         "unknown key 'rollout.reward.by_data_source.a/b.wrong'; did you mean 'wrong_score'?"),
        ({"rollout": {"reward": {"default": {"kind": "code", "sandbox_fusion_url": "http://s"}}}},
         "programs run in the rollout server's own sandbox; remove the key"),
        ({"dataset": {"file": 3}}, "dataset.file: must be a path or a list, not 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_and_what_is_expected(data: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"model": {"path": "x"}} | data, "run.yaml")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_wrong_field_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("modle: {path: x}\nlearner: {lr: fast, num_step: 3}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["--seed", "abc"])
    assert str(caught.value).splitlines() == [
        f"{file}: unknown key 'learner.num_step'; did you mean 'num_steps'?",
        f"{file}: unknown key 'modle'; did you mean 'model'?",
        "command line: seed: must be a whole number, not 'abc'",
        f"{file}: learner.lr: must be a number, not 'fast'",
    ]


def test_a_missing_section_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="run.yaml: model is missing; give a section with path"):
        validate({"run": "x"}, "run.yaml")
