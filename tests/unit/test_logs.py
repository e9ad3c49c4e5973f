"""Log lines as JSON carry the context that the code has bound."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.logs import bind, printing_to, setup_logging

logger = logging.getLogger("test")


@pytest.fixture(autouse=True)
def json_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log as JSON in this test only. pytest's own handlers come back afterwards."""
    monkeypatch.setenv("PENSTOCK_LOG", "json")
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_says_run_component_and_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("learner", "demo")

    def step() -> None:
        bind(step=3, policy_version=2)
        logger.info("trained")
        bind(policy_version=3)
        logger.info("published")

    contextvars.copy_context().run(step)
    logger.warning("later", extra={"server_id": "rollout-0"})
    first, second, third = lines(capsys)
    assert {name: first[name] for name in ("run", "component", "message", "step", "policy_version")} == {
        "run": "demo", "component": "learner", "message": "trained", "step": 3, "policy_version": 2,
    }  # fmt: skip
    assert (second["step"], second["policy_version"]) == (3, 3)
    assert "step" not in third and third["server_id"] == "rollout-0"


async def test_tasks_keep_apart_what_they_bind(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("rollout-0", "demo")

    async def work(prompt_id: int) -> None:
        bind(prompt_id=prompt_id)
        await asyncio.sleep(0)
        logger.info("of %d", prompt_id)

    await asyncio.gather(*(work(prompt_id) for prompt_id in range(3)))
    assert [(line["message"], line["prompt_id"]) for line in lines(capsys)] == [(f"of {n}", n) for n in range(3)]


def test_a_field_that_is_not_known_is_refused() -> None:
    with pytest.raises(AssertionError, match="stepp"):
        bind(stepp=1)


def test_what_libraries_and_children_print_goes_to_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "engine.log"
    with printing_to(log) as terminal:
        os.write(1, b"a library\n")
        subprocess.run([sys.executable, "-c", "import sys; print('a child', file=sys.stderr)"], check=True)
        logging.getLogger("vllm").warning("pages of it")
        logging.getLogger("penstock_tools").warning("a row failed")
        print("ready", file=terminal)
    print("done", file=sys.stderr)
    assert capfd.readouterr().err.splitlines() == ["WARNING: a row failed", "ready", "done"]
    assert log.read_text() == "a library\na child\n"
    with printing_to(None) as terminal:
        assert terminal is sys.stderr
