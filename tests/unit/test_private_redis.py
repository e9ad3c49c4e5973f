"""The config of a private Redis server."""

from __future__ import annotations

from pathlib import Path

from penstock.config.loading import validate
from penstock_tools.local.private_redis import without_private_redis, write_config

START_SCRIPT = Path(__file__).parents[2] / "deploy" / "redis" / "start.sh"


def test_a_password_is_kept_and_made_again_if_it_was_cut_off(tmp_path: Path) -> None:
    _, first = write_config(tmp_path, 7000)
    config, second = write_config(tmp_path, 7000)
    assert first == second
    (tmp_path / "password").write_text("")
    _, third = write_config(tmp_path, 7000)
    [line] = [line for line in config.read_text().splitlines() if line.startswith("requirepass")]
    assert len(line.split()) == 2 and line.split()[1] in third
    assert (tmp_path / "password").stat().st_mode & 0o777 == 0o600


def test_the_config_of_a_runs_folder_starts_the_private_server_again(tmp_path: Path) -> None:
    fields = {"run": "a", "run_dir": str(tmp_path), "model": {"path": "m"}}
    plain = validate(fields, "test")
    _, url = write_config(plain.folder / "redis", 7000)
    assert without_private_redis(validate(fields | {"redis": {"url": url}}, "test")) == plain
    for other in ("redis://127.0.0.1:7000/0", "redis://:another@127.0.0.1:7000/0"):
        given = validate(fields | {"redis": {"url": other}}, "test")
        assert without_private_redis(given) == given
    assert without_private_redis(plain) == plain


def test_compose_and_the_chart_have_the_same_settings_for_the_queue(tmp_path: Path) -> None:
    config, _ = write_config(tmp_path, 7000)
    settings = [line for line in config.read_text().splitlines() if "-max-ziplist-" in line]
    script = START_SCRIPT.read_text()
    assert len(settings) == 2 and all(f"--{setting}" in script for setting in settings)
