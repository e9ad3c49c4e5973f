"""`penstock export` writes only weights that are intact and finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from penstock.cli.main import main
from penstock.config.loading import validate
from penstock.replay.queue_types import RunRewind
from penstock_learner.checkpoints import CheckpointStore, record_rewind
from penstock_learner.roles.policy import PolicyWorker
from penstock_learner.term import TrainerState
from support.learner_ranks import make_rank, with_model

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def checkpoints(tmp_path: Path, tiny_models: dict[str, Path]) -> list[Path]:
    """Two checkpoints of run `r` in `tmp_path`, the newest first. All weights of step N are N."""
    config = validate(with_model({}, tiny_models["policy"]), "test")
    worker = make_rank(PolicyWorker, config)
    store = CheckpointStore(tmp_path / "r" / "checkpoints", keep=2)
    for step in (1, 2):
        with torch.no_grad():
            for parameter in worker.trained.parameters():
                parameter.fill_(step)
        partial = store.partial_folder(step, 1)
        worker.stage(partial)
        store.finish(partial, TrainerState(step, step, 1), worker.finish_saving())
    settings = {"run": "r", "run_dir": str(tmp_path), "model": {"path": str(tiny_models["policy"])}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return store.newest_first()


def export(folder: Path, *options: str) -> tuple[int, set[float]]:
    """The exit code of `penstock export`, and the numbers in the weights that it wrote."""
    out = folder / "out"
    code = main(["export", "--config", str(folder / "run.yaml"), "--out", str(out), *options])
    if not out.exists():
        return code, set()
    return code, {
        value for weight in load_file(out / "model.safetensors").values() for value in weight.unique().tolist()
    }


def damage(checkpoint: Path) -> Path:
    shards = checkpoint / "__0_0.distcp"
    content = bytearray(shards.read_bytes())
    content[len(content) // 2] ^= 1
    shards.write_bytes(content)
    return shards


def test_the_newest_is_exported_and_named_before_and_after(
    tmp_path: Path, checkpoints: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert export(tmp_path) == (0, {2.0})
    exported, reading = f"exported {checkpoints[0]} to {tmp_path / 'out'}\n", f"reading {checkpoints[0]}\n"
    assert capfd.readouterr() == (exported, reading)


def test_the_model_of_the_config_may_be_an_id_of_the_hub(
    tmp_path: Path, checkpoints: list[Path], tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(kind: str, name: str, *_: object) -> Path:
        asked.append((kind, name))
        return tiny_models["policy"]

    monkeypatch.setattr("penstock.hub._download", download)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"model": {"path": "own/tiny"}}))
    assert export(tmp_path) == (0, {2.0})
    assert asked == [("model", "own/tiny")]
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"config.json", "tokenizer_config.json"}


def test_a_damaged_newest_checkpoint_is_refused_and_the_one_before_is_exported_by_name(
    tmp_path: Path, checkpoints: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shards = damage(checkpoints[0])
    assert export(tmp_path) == (1, set())
    [line] = capsys.readouterr().err.splitlines()
    assert f"{checkpoints[0].name} ({shards} is damaged: expected checksum" in line
    assert line.endswith(f"to export the newest intact one, give --checkpoint {checkpoints[1]}")
    assert export(tmp_path, "--checkpoint", str(checkpoints[1])) == (0, {1.0})


def test_a_checkpoint_that_the_run_abandoned_is_not_exported(tmp_path: Path, checkpoints: list[Path]) -> None:
    rewind = RunRewind(str(checkpoints[1]), term=2, num_orders=0)
    record_rewind(checkpoints[0].parent, 2, rewind, is_done=True)
    assert export(tmp_path) == (0, {1.0})


def test_no_checkpoint_is_exported_while_a_learner_goes_back(
    tmp_path: Path, checkpoints: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, rewind = checkpoints[0].parent, RunRewind(str(checkpoints[1]), term=2, num_orders=0)
    record_rewind(folder, 2, rewind, is_done=False)
    assert export(tmp_path) == (2, set())
    [line] = capsys.readouterr().err.splitlines()
    assert f"a learner was about to rewind to {checkpoints[1]}" in line and "start the learner again" in line
    assert export(tmp_path, "--checkpoint", str(checkpoints[0])) == (0, {2.0})


def test_a_damaged_checkpoint_that_is_named_is_refused(
    tmp_path: Path, checkpoints: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shards = damage(checkpoints[1])
    assert export(tmp_path, "--checkpoint", str(checkpoints[1])) == (1, set())
    [line] = capsys.readouterr().err.splitlines()
    assert f"{shards} is damaged: expected checksum" in line


def test_weights_that_the_type_cannot_hold_are_not_written(
    tmp_path: Path, checkpoints: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock_tools import export as module

    load = module._load

    def with_large_weight(config: object, checkpoint: Path) -> torch.nn.Module:
        model = load(config, checkpoint)  # type: ignore[arg-type]
        with torch.no_grad():
            model.lm.get_parameter("model.norm.weight").fill_(1e6)
        return model

    monkeypatch.setattr(module, "_load", with_large_weight)
    assert export(tmp_path, "--dtype", "float16") == (1, set())
    assert "model.norm.weight is not finite in float16" in capsys.readouterr().err
