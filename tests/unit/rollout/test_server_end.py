"""How a rollout server that fails says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis.asyncio as redis

from penstock.errors import Unavailable
from penstock.store.notices import Notices
from penstock_rollout import __main__ as command
from penstock_rollout import server as server_module
from penstock_rollout.server import record_end


async def test_a_server_that_ends_with_an_error_leaves_a_notice(redis_client: redis.Redis) -> None:
    notices = Notices(redis_client, "test")
    for _ in range(2):
        try:
            {}["missing"]
        except KeyError as error:
            await record_end(notices, "rollout-0", ExceptionGroup("tasks", [error]))
    await record_end(notices, "rollout-1", Unavailable("SGLang has died; restart the rollout server"))
    by_text = {notice.text: notice for notice in await notices.newest_first()}
    assert by_text.keys() == {
        "rollout-0 ended: KeyError: 'missing'", "rollout-1 ended: SGLang has died; restart the rollout server",
    }  # fmt: skip
    failed = by_text["rollout-0 ended: KeyError: 'missing'"]
    assert (failed.kind, failed.count) == ("server_failed", 2) and '{}["missing"]' in failed.detail


def test_the_last_line_of_the_log_names_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(*_: object) -> None:
        raise ExceptionGroup("tasks", [KeyError("missing")])

    monkeypatch.setattr(server_module, "serve", serve)
    config = tmp_path / "run.yaml"
    config.write_text(f"run: test\nrun_dir: {tmp_path}\nmodel: {{path: {tmp_path}}}\n")
    assert command.main(["--config", str(config)]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1] == "penstock rollout: error: KeyError: 'missing'"
