"""Every command of README.md and docs/ works as written, in order, on a fresh clone."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import main as cli
from support.doc_commands import (
    MAIN_RUN,
    NEED_STOPPED_RUN,
    NOT_RUN,
    PAGES,
    ROOT,
    UNTIL_INTERRUPTED,
    Clone,
    Command,
    commands_of,
)

README = commands_of("README.md")
(UP,) = [command for command in README if command.text.removeprefix(".venv/bin/") == MAIN_RUN]


def follow(clone: Clone, commands: list[Command]) -> None:
    """Run the commands. README's run goes on, unless a command needs it stopped; others end with their block."""
    block = None
    for command in commands:
        if command.block != block:
            end_of_block(clone)
        block = command.block
        if clone.skips(command) or command == UP:
            continue
        if re.match(NEED_STOPPED_RUN, command.text.removeprefix(".venv/bin/")):
            if UP in clone.processes:
                clone.resume()  # a run that is paused stays so when it is started again
                clone.stop(UP)
        elif UP not in clone.processes and (clone.folder / "my-run.yaml").exists() and "--check" not in command.text:
            clone.run(UP)
        if UP in clone.processes:
            clone.resume() if command.needs_progress else clone.rest()
        clone.run(command)
    end_of_block(clone)


def end_of_block(clone: Clone) -> None:
    for command in [command for command in clone.processes if command != UP]:
        clone.stop(command)


@pytest.fixture
def quick_clone(tmp_path: Path) -> Iterator[Clone]:
    clone = Clone(tmp_path, is_quick=True)
    yield clone
    clone.end()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    clone = Clone(tmp_path_factory.mktemp("clone"), is_quick=False)
    yield clone
    clone.end()


@pytest.mark.timeout(1500)
def test_the_commands_of_the_readme(quick_clone: Clone) -> None:
    """At the end the operator stops the run, and it ends by itself."""
    assert len(README) > 15
    follow(quick_clone, README)
    shown = quick_clone.stop_by_order(UP)
    assert "starting or joining Ray" in shown, "by itself, or with its time after the next phase"
    for phase in ("waiting for the first batch", "training"):
        assert f"learner: {phase}" in shown
    assert "rollout-0: serving (joining the fleet and waiting for the current weights: " in shown


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_commands_of_every_page(clone: Clone) -> None:
    """With the engine and the models that `penstock init` chooses."""
    if shutil.which("helm") is None:
        pytest.skip("helm is not on the PATH; on ARM, .ci/emulated-helm makes one")
    follow(clone, README)
    clone.run(UP)
    clone.resume()
    clone.dead_letter_a_prompt()
    for page in PAGES[1:]:
        follow(clone, commands_of(page))


def test_commands_within_sentences_exist_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = []
    for page, command in sorted(commands_in_sentences()):
        words = command.split()[1:]
        name = list(itertools.takewhile(str.isalpha, words))
        try:
            code = cli.main([words[0], *(name[1:2] if words[0] in ("queue", "keys") else []), "--help"])
        except SystemExit as end:
            code = int(end.code or 0)
        shown = capsys.readouterr().out
        options = [word for word in words if word.startswith("--") and "." not in word]
        if code or any(option not in shown for option in options):
            unknown.append(f"{page}: {command}")
    assert unknown == []


def commands_in_sentences() -> set[tuple[str, str]]:
    found = set()
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        found |= {(page, command) for command in re.findall(r"`(penstock [a-z][^`\n]*)`", text)}
    assert len(found) > 60
    return found


def test_every_command_is_run_or_has_a_reason() -> None:
    """A reason or an exception that no command has is out of date."""
    commands = [command for page in PAGES for command in commands_of(page)]
    assert len(commands) > 45
    reasons = {command.reason_not_to_run for command in commands}
    assert reasons == {"", *NOT_RUN.values()}
    for pattern in UNTIL_INTERRUPTED:
        assert any(re.fullmatch(pattern, command.text.removeprefix(".venv/bin/")) for command in commands), pattern
