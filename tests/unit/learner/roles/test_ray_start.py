"""The start of a private Ray on a machine that is too busy for Ray's own limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.run import ModelConfig, RunConfig
from penstock.errors import Unavailable
from penstock_learner.roles import ray_cluster

TOO_SLOW = "The current node timed out during startup."


def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[str], address: str = "") -> list[str]:
    """Start Ray where the first starts fail with these errors. Returns the folders that were tried."""
    folders: list[str] = []

    def fail_first(config: RunConfig, roles: object, folder: str) -> None:
        folders.append(folder)
        if len(folders) <= len(errors):
            raise RuntimeError(errors[len(folders) - 1])

    monkeypatch.setattr(ray_cluster, "_start", fail_first)
    config = RunConfig(model=ModelConfig(path=Path("m")))
    learner = config.learner.model_copy(update={"ray_address": address})
    ray_cluster._start_patiently(config.model_copy(update={"learner": learner}), {}, tmp_path)
    return folders


def test_a_private_ray_that_is_too_slow_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = start(tmp_path, monkeypatch, [TOO_SLOW, TOO_SLOW])
    assert len(folders) == len(set(folders)) == 3, "each try has a folder of its own"


@pytest.mark.parametrize(
    ("errors", "address"), [([TOO_SLOW] * 3, ""), (["no such file"], ""), ([TOO_SLOW], "10.0.0.1:6379")]
)
def test_a_ray_that_does_not_start_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[str], address: str
) -> None:
    with pytest.raises(Unavailable, match=f"Ray did not start: {errors[-1]}; check learner.ray_address"):
        start(tmp_path, monkeypatch, errors, address)
