"""Where processes keep what they compile."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.machine import VARIABLES, keep_compiled_code


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the environment after a test, too."""
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


def config_of(folder: Path, **fields: object) -> RunConfig:
    return validate({"model": {"path": "/model"}, "run_dir": str(folder / "runs"), **fields}, "test")


def test_all_runs_of_a_folder_share_a_private_cache(tmp_path: Path) -> None:
    keep_compiled_code(config_of(tmp_path, run="first").cache_folder)
    first = {name: os.environ.pop(name) for name in VARIABLES}
    keep_compiled_code(config_of(tmp_path, run="second").cache_folder)
    assert first == {name: os.environ[name] for name in VARIABLES}
    folder = tmp_path / "runs" / "_cache"
    assert all(Path(value).parent == folder for value in first.values())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "some of its files are loaded as code"


def test_a_relative_folder_stays_the_same_in_another_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep_compiled_code(config_of(tmp_path, cache_dir="kept").cache_folder)
    assert os.environ["VLLM_CACHE_ROOT"] == str(tmp_path / "kept" / "vllm")


def test_variables_of_the_user_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    keep_compiled_code(config_of(tmp_path).cache_folder)
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] != "/elsewhere"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache_dir .*file/cache cannot be made: .*; set it to a writable folder"):
        keep_compiled_code(config_of(tmp_path, cache_dir=str(tmp_path / "file" / "cache")).cache_folder)


def test_a_rank_compiles_into_the_folder(tmp_path: Path) -> None:
    """Importing the workers must not fix torch's folder: a rank on a Ray that was started elsewhere sets it later."""
    program = (
        "import sys, penstock_learner.algorithms.losses, penstock_learner.optim.optimizer\n"
        "import penstock_learner.roles.role_group\n"
        "from penstock.machine import keep_compiled_code\n"
        "from penstock.config.loading import validate\n"
        "keep_compiled_code(validate({'model': {'path': '/model'}, 'cache_dir': sys.argv[1]}, 'test').cache_folder)\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "print(cache_dir())\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == str(tmp_path / "inductor")
