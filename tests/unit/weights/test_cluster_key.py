"""The cluster key: where it comes from, and that processes which start together make one key."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.internal_calls import KEY_HEADER, ClusterKey

NUM_PROCESSES = 16


def config_in(folder: Path, **weights: Any) -> RunConfig:
    fields = {"run": "r", "run_dir": str(folder), "model": {"path": "unused"}, "weights": weights}
    return validate(fields, "test")


def test_processes_that_start_together_make_one_key(tmp_path: Path) -> None:
    def key(_: int) -> str:
        made = ClusterKey.of(config_in(tmp_path))
        made.make_if_missing()
        return made.read()

    with ThreadPoolExecutor(NUM_PROCESSES) as threads:
        assert len(set(threads.map(key, range(NUM_PROCESSES)))) == 1
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["cluster.key"], "nothing else is left"


def test_a_named_file_is_never_made(tmp_path: Path) -> None:
    key = ClusterKey.of(config_in(tmp_path, cluster_key_file=str(tmp_path / "mine")))
    with pytest.raises(ConfigError, match=r"weights\.cluster_key_file .*/mine cannot be read: No such file"):
        key.make_if_missing()
    (tmp_path / "mine").write_text("\n")
    with pytest.raises(ConfigError, match="is empty; write a secret into it"):
        key.make_if_missing()
    (tmp_path / "mine").write_text("a secret\n")
    key.make_if_missing()
    assert key.metadata() == [(KEY_HEADER, "a secret")]


@pytest.mark.parametrize("given", [[], [(KEY_HEADER, "")], [(KEY_HEADER, "another")], [("other", "a secret")]])
def test_only_the_key_itself_is_accepted(tmp_path: Path, given: list[tuple[str, str | bytes]]) -> None:
    (tmp_path / "mine").write_text("a secret")
    key = ClusterKey.of(config_in(tmp_path, cluster_key_file=str(tmp_path / "mine")))
    assert not key.is_in(given)
    assert key.is_in([(KEY_HEADER, b"a secret")])
