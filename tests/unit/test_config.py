"""Configuration: files, overrides, and errors that say what to do."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from penstock.config.loading import dump_config, load_config, parse_overrides
from penstock.config.run import RunConfig
from penstock.errors import ConfigError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    path
    for pattern in (
        "examples/**/demo.yaml",
        "examples/presets/*.yaml",
        "examples/own_steps/*.yaml",
        "examples/recipes/*/*.yaml",
        "deploy/compose/run-*.yaml",
    )
    for path in ROOT.glob(pattern)
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: somewhere}\nlearner: {lr: 1e-4}\n")
    return path


def test_overrides_come_after_the_file(file: Path) -> None:
    config = load_config(file, ["--learner.lr", "3e-5", "--replay.max-staleness=0", "--learner.betas", "[0.8, 0.9]"])
    assert (config.learner.lr, config.replay.max_staleness, config.learner.betas) == (3e-5, 0, (0.8, 0.9))


def test_scientific_notation_without_a_dot_is_a_number(file: Path) -> None:
    assert load_config(file).learner.lr == 1e-4


def test_a_misspelled_key_is_named_before_the_key_that_is_missing_for_it(file: Path) -> None:
    file.write_text("modle: {path: somewhere}\n")
    with pytest.raises(ConfigError, match=r"run.yaml: unknown key 'modle'; did you mean 'model'\?$"):
        load_config(file)


def test_a_resolved_config_reads_back_as_it_was(file: Path, tmp_path: Path) -> None:
    config = load_config(file, ["--learner.placement", "split-collocate"])
    dumped = tmp_path / "resolved.yaml"
    dumped.write_text(dump_config(config))
    assert load_config(dumped) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--learner.num_step", "3"], "unknown key 'learner.num_step'; did you mean 'num_steps'?"),
        (["--lerner.lr", "3"], "unknown key 'lerner'; did you mean 'learner'?"),
        (["--lr", "3"], "command line: unknown key 'lr'; did you mean 'learner.lr'?"),
        (["--learner.LR", "3"], "unknown key 'learner.LR'; did you mean 'lr'?"),
        (["--num-steps", "3"], "did you mean 'learner.num_steps'?"),
        (["--max-tokens", "3"], "did you mean 'dataset.max_tokens'?"),
        (["--learner.stalenes", "3"], "did you mean 'replay.max_staleness'?"),
        (["--modle.path", "x"], "command line: unknown key 'modle'; did you mean 'model'?"),
        (["--learner.algorithm.loss.clip", "3"], "did you mean 'clip_low'?"),
        (["--learner.algorithm.loss.name", "pppo"], "did you mean 'ppo'?"),
        (["--rollout.reward.by_data_source", "{x: {kind: math, wrong: 1}}"], "did you mean 'wrong_score'?"),
        (["--learner.lr", "fast"], "command line: learner.lr: must be a number, not 'fast'"),
        (["--learner.lr"], "--learner.lr needs a value"),
        (["--learner.compile", "--seed", "3"], "--learner.compile needs a value"),
        (["--replay.stale_policy=wait", "--replay.selection=freshest"], "`wait` trains in order of admission"),
        (["--redis.url=http://h"], "must start with redis://, rediss:// or unix://"),
        (
            ["--redis.url=redis://u@h", "--redis.password_file=p"],
            "contains credentials, and username",
        ),
        (["--redis.url=redis://:secret@h"], "shows its password to every user of this machine"),
        (["--redis", "{url: 'redis://u:secret@h'}"], "set redis.password_file"),
        (["--redis.username=u"], "set password_file as well"),
        (["--redis.url=redis://h", "--redis.tls_ca_file=ca.pem"], "only a rediss:// url uses TLS"),
        (["--redis.url=rediss://h", "--redis.tls_cert_file=c.pem"], "set tls_key_file as well"),
        (["--redis.url=unix:///s", "--redis.cluster=true"], "a Redis Cluster needs"),
        (
            ["--redis.url=redis://Head/0", "--learner.ray_address=head:6379"],
            "learner.ray_address head:6379 is the address of redis.url; give the one of Ray's head",
        ),
        (["--learner.ray_address=ray://head:10001"], "learner.ray_address: must be HOST:PORT of a Ray head"),
        (
            ["--dataset.file=s3://b/train.parquet"],
            "dataset.file: s3://b/train.parquet is a URL, and datasets are read from",
        ),
        (
            ["--dataset.file", "[{file: 'gs://b/a'}]"],
            "on Kubernetes, that of a file on the claim storage.data.existingClaim",
        ),
        (["--dataset.validation.file=s3://b/v"], "dataset.validation.file: s3://b/v is a URL"),
        (["learner.lr", "1"], "'learner.lr' is not an override"),
        (
            ["--run", "No Spaces"],
            "run: must be at most 63 small letters, digits, - and _, without spaces, not 'No Spaces'",
        ),
        (["--seed.x", "1"], "seed"),
        (
            ["--dataset.validation", "{temperature: 0, num_samples: 30}"],
            "dataset.validation: temperature 0 gives the same answer 30 times: raise it, or set num_samples to 1",
        ),
        *(
            (
                ["--dataset", "{file: d.parquet, num_samples: 1}", f"--learner.algorithm.advantage.name={name}"],
                f"advantage {name} compares the samples of a prompt, so with one it trains nothing",
            )
            for name in ("rloo", "opo", "grpo_passk")
        ),
    ],
)
def test_a_wrong_override_is_explained_in_one_line(file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("model: [", "is not YAML"), ("- a\n- b\n", "must be a mapping"), ("run: x\n", "model is missing")],
)
def test_a_broken_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")


# ── files that extend others ──


def _write(folder: Path, **files: str) -> Path:
    """Write NAME.yaml for each. Returns the path of `top.yaml`."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / "top.yaml"


def test_a_file_extends_others_by_names_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "shared", base="model: {path: m}\ndataset: {file: d.jsonl, num_samples: 4}\nlearner: {lr: 1e-4}")
    _write(tmp_path / "shared", fast="extends: base.yaml\nlearner: {lr: 2e-4, num_steps: 3}\ndataset: {epochs: 2}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    top = _write(tmp_path, top="extends: shared/fast.yaml\nlearner: {num_steps: 5}")
    config = load_config(top, ["--dataset.epochs", "7"])
    assert (config.learner.lr, config.learner.num_steps) == (2e-4, 5)
    assert (config.dataset.num_samples, config.dataset.epochs) == (4, 7)
    assert str(config.dataset.file) == "d.jsonl", "a path in an extended file stays relative to the working directory"
    assert "extends" not in dump_config(config)


def test_a_file_that_two_others_extend_counts_once(tmp_path: Path) -> None:
    top = _write(
        tmp_path, base="model: {path: m}\nseed: 1\nrun: r", left="extends: base.yaml\nseed: 2",
        right="extends: base.yaml\nrun: right", top="extends: [left.yaml, right.yaml]",
    )  # fmt: skip
    config = load_config(top)
    assert (config.seed, config.run) == (2, "right"), "base must not come again after left"


def test_a_section_of_another_kind_replaces_the_one_it_extends(tmp_path: Path) -> None:
    reward = "rollout: {reward: {by_data_source: {x: {kind: %s}}}}"
    base = "model: {path: m}\n" + reward % "gsm8k, method: flexible"
    top = _write(tmp_path, base=base, top="extends: base.yaml\n" + reward % "math")
    assert load_config(top).rollout.reward.by_data_source["x"].kind == "math"


@pytest.mark.parametrize(
    ("base", "top", "message"),
    [
        ("learner: {lr: fast}", "seed: 1", "{base}: learner.lr: must be a number, not 'fast'"),
        ("learner: {lr: fast}", "learner: {lr: slow}", "{top}: learner.lr: must be a number, not 'slow'"),
        ("learner: {lr: 1}", "learner: {lr: null}", "{top}: learner.lr: must be a number, not empty"),
        ("learner: {num_step: 1}", "learner: {lr: 1}", "{base}: unknown key 'learner.num_step'; did you mean"),
        ("replay: {stale_policy: wait}", "replay: {selection: freshest}", "{base} and {top}: replay: "),
        ("replay: 3", "replay: {selection: x}", "{top}: replay.selection: must be"),
        ("learner: {loggers: [1]}", "learner: {lr: 1}", "{base}: learner.loggers[0]: must be "),
        ("run: r", "dataset: {validation: {}}\nsft: {file: 3}", "{top}: sft.file: must be"),
    ],
)
def test_an_error_names_the_file_that_has_the_value(tmp_path: Path, base: str, top: str, message: str) -> None:
    file = _write(tmp_path, base=f"model: {{path: m}}\n{base}", top=f"extends: base.yaml\n{top}")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(message.format(base=tmp_path / "base.yaml", top=file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"top": "extends: a.yaml", "a": "extends: b.yaml", "b": "extends: a.yaml"},
         "{0}/top.yaml extends {0}/a.yaml extends {0}/b.yaml extends {0}/a.yaml: remove one of these `extends`"),
        ({"top": "extends: top.yaml"}, "{0}/top.yaml extends {0}/top.yaml: remove"),
        ({"top": "extends: none.yaml"}, "{0}/top.yaml extends {0}/none.yaml, which does not exist"),
        ({"top": "extends: 3"}, "{0}/top.yaml: extends must be a file or a list of files, not 3"),
        ({"top": "extends: [[a.yaml]]"}, "{0}/top.yaml: extends must be a file or a list of files, not [['a.yaml']]"),
        ({"top": "extends: a.yaml", "a": "- x"}, "{0}/a.yaml must be a mapping"),
        ({"top": "extends: a.yaml", "a": "x: ["}, "{0}/a.yaml is not YAML"),
        ({"top": "model: {extends: a.yaml}"}, "{0}/top.yaml: unknown key 'model.extends'"),
    ],
)  # fmt: skip
def test_a_wrong_extends_is_explained_in_one_line(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(_write(tmp_path, **files))
    assert str(caught.value).splitlines()[0].startswith(message.format(tmp_path))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_config_loads(path: Path) -> None:
    load_config(path)


def test_overrides_take_both_spellings() -> None:
    assert parse_overrides(["--a.b", "1", "--c-d=x"]) == [(["a", "b"], 1), (["c_d"], "x")]


def _numeric_fields(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """The path of every field that takes a number, and whether it takes whole numbers only."""
    for name, field in model.model_fields.items():
        kinds = get_args(field.annotation) or (field.annotation,)
        if int in kinds or float in kinds:
            yield (*path, name), float not in kinds
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _numeric_fields(kind, (*path, name))


@pytest.mark.parametrize("number", [10**20, math.nan])
def test_no_field_takes_a_number_that_would_fill_the_memory(number: float) -> None:
    accepted = []
    for path, is_whole in _numeric_fields(RunConfig):
        section: dict[str, Any] = {path[-1]: number}
        for name in reversed(path[:-1]):
            section = {name: section}
        with contextlib.suppress(ValidationError):
            RunConfig.model_validate({"model": {"path": "somewhere"}} | section)
            accepted += [path] if is_whole or not math.isfinite(number) else []
    assert accepted == []


@pytest.mark.parametrize("field", ["policy.num_ranks", "lr", "num_steps", "batch_timeout_s"])
def test_a_number_that_is_too_large_is_refused_with_its_limit(file: Path, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"learner.{field}: must be at most .*, not 1(e\+12|0{{12}})"):
        load_config(file, [f"--learner.{field}", str(10**12)])


def test_no_process_parses_the_docstrings_of_fields() -> None:
    """That takes a third of the import. Pages and schemas have them."""
    program = "from penstock.config.run import RunConfig; print(RunConfig.model_fields['run'].description)"
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_DESCRIBE_CONFIG"}
    for variables, begin in ({}, "None"), ({"PENSTOCK_DESCRIBE_CONFIG": "1"}, "Name of the run."):
        command = [sys.executable, "-c", program]
        assert subprocess.check_output(command, env=environment | variables, text=True, timeout=60).startswith(begin)
