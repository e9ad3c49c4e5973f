"""The `penstock` command: what it imports, prints and returns."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from rich.console import Console

from penstock.api.records import Policy, QueueStat, Run, Server
from penstock.cli import main as cli
from penstock.cli.commands import control, observe
from penstock.cli.connection import only_gateway
from penstock.client import SyncPenstockClient
from penstock.client.address import write_restarting
from penstock.config.run import RunConfig
from penstock.diagnosis.terminal import sparkline
from penstock.errors import ConfigError, InvalidInput, PenstockError, Unavailable

HEAVY = ("torch", "vllm", "ray", "grpc", "fastapi", "httpx", "numpy", "pyarrow", "redis", "pydantic", "rich")
LIGHT_COMMANDS = (
    "submit", "feed", "status", "top", "doctor", "policies", "plan", "simulate", "generate", "evaluate", "gateway",
    "samples", "plot",
)  # fmt: skip


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`command(error)` makes `penstock fake` raise the error."""

    def install(error: BaseException) -> None:
        def main(argv: list[str]) -> int:
            raise error

        monkeypatch.setitem(sys.modules, "penstock_services.fake", SimpleNamespace(main=main))
        monkeypatch.setitem(cli.COMMANDS, "fake", ("penstock_services.fake", ""))

    return install


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in LIGHT_COMMANDS)])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    script = f"""
import sys
from penstock.cli.main import main
try:
    code = main({words!r})
except SystemExit as exit:
    code = exit.code
heavy = sorted(set({HEAVY!r}) & set(sys.modules))
assert not code and not heavy, (code, heavy)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: penstock")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_fits_a_terminal(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        cli.main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert 5 < len(lines) <= 40
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("word", "hint"), [("statsu", "did you mean status?"), ("polices", "did you mean policies?"), ("xyzzy", "demo")]
)
def test_an_unknown_command_suggests_the_nearest(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 2
    error = capsys.readouterr().err
    assert hint in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["up", "run.yaml", "--chek"], "unknown option --chek; did you mean --check?"),
        (["demo", "--hlep"], "unknown option --hlep; did you mean --help?"),
        (["generate", "a.parquet", "--output", "b", "--tempreature=1"], "did you mean --temperature?"),
        (["up", "run.yaml", "--run", "x"], "run.yaml does not exist"),
        (["up", "--learner.lr", "1", "run.yaml"], "run.yaml does not exist"),
        (["up", "run.yaml", "--lr", "1"], "unknown option --lr; did you mean 'learner.lr'?"),
        (["top", "--intervall", "2"], "penstock top: error: unknown option --intervall; did you mean --interval?"),
        (["policies", "--limt", "5"], "did you mean --limit?"),
        (["status", "--jso"], "did you mean --json?"),
        (["status", "-json"], "unknown option -json; did you mean --json?"),
        (["queue", "peek", "--limmit", "3"], "penstock queue peek: error: unknown option --limmit"),
        (["queue", "dlq", "purge", "--yess"], "did you mean --yes?"),
        (["keys", "make", "--scop", "read"], "did you mean --scope?"),
        (["keys", "make", "--role", "read"], "--role: is called --scope"),
        (["--verison"], "unknown option '--verison'; did you mean --version?"),
    ],
)
def test_an_unknown_option_suggests_the_nearest(
    words: list[str], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert hint in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["policies", "premote", "3"], "unknown action 'premote'; did you mean promote?"),
        (["policies", "promote"], "promote takes VERSION, which is missing"),
        (["queue", "peak"], "unknown command 'peak'; did you mean peek?"),
        (["queue", "dlq", "lst"], "unknown action 'lst'; did you mean list?"),
        (["queue"], "COMMAND is missing: give one of stat, peek, export, import, requeue or dlq"),
        (["keys"], "ACTION is missing: give one of make or list"),
        (["runs", "resum"], "did you mean resume?"),
        (["servers", "dran", "a"], "did you mean drain?"),
        (["up"], "CONFIG is missing (YAML file of the run); see `penstock up --help`"),
        (["generate"], "FILE and --output are missing; see `penstock generate --help`"),
        (["feed"], "--config is missing (YAML file of the run)"),
        (["top", "--interval"], "--interval needs a value"),
        (["top", "--interval", "fast"], "--interval: 'fast' is not a number"),
        (["policies", "--limit", "x"], "--limit: 'x' is not a whole number"),
        (["generate", "a.jsonl", "--output", "a.parquet", "--n", "0"], "--n: must be at least 1, not 0"),
        (["status", "--run-dir", "a", "--url", "b"], "--url cannot be combined with --run-dir"),
        (["plan", "--placement", "standalon"], "--placement: 'standalon' is not a choice; did you mean standalone?"),
        (["init", "--algorithm", "zzz"], "--algorithm: 'zzz' is not a choice; choose one of "),
        (["status", "here"], "unexpected 'here'; see `penstock status --help`"),
        (["runs", "pause", "--learner.lr", "1"], "unknown option --learner.lr; see `penstock runs --help`"),
    ],
)
def test_a_wrong_command_line_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("penstock") and error.count("\n") == 1


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_refuses_an_unknown_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--hlep"]) == 2
    shown = capsys.readouterr()
    assert "unknown option --hlep; did you mean --help?" in shown.err
    assert shown.err.count("\n") == 1 and not shown.out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad config"), 2),
        (InvalidInput("a.b", "bad input"), 2),
        (Unavailable("no gateway"), 1),
        (PenstockError("anything"), 1),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    command: Any, error: PenstockError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command(error)
    assert cli.main(["fake"]) == code
    assert capsys.readouterr().err == f"penstock: error: {error}\n"


def test_interruption_and_missing_extras(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command(KeyboardInterrupt())
    assert cli.main(["fake"]) == 130
    command(ModuleNotFoundError("No module named 'fastapi'", name="fastapi"))
    assert cli.main(["fake"]) == 1
    error = capsys.readouterr().err
    assert "needs the extra [services]" in error and "pip install 'penstock[all]'" in error


def test_a_closed_pipe_is_quiet() -> None:
    script = "import sys; from penstock.cli.main import main; sys.stdin.read(); sys.exit(main(['--help']))"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stdin.close()  # it writes only now
    with process.stderr as stderr:
        assert stderr.read() == b""
    assert process.wait(timeout=60) == 141


@pytest.mark.parametrize("name", ["status", "policies"])
def test_a_run_that_is_not_up_says_so(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--run-dir", str(tmp_path)]) == 2
    assert f"{tmp_path} is not the folder of a run; check the path" in capsys.readouterr().err
    (tmp_path / "config.yaml").touch()
    assert cli.main([name, "--run-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"the run in {tmp_path} is not up; `penstock up`" in said and f"doctor --run-dir {tmp_path}" in said
    assert f"`penstock runs metrics {tmp_path}` shows its steps" in said
    (tmp_path / "lock").write_text(str(os.getpid()))  # as the supervisor of a run that is up does
    assert cli.main([name, "--run-dir", str(tmp_path)]) == 2
    assert f"the run in {tmp_path} is starting or stopping, and its gateway is not up" in capsys.readouterr().err


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`runs(name)` puts a run into `runs/` whose gateway accepts connections, and returns its socket."""
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as stack:

        def start(name: str) -> socket.socket:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            (tmp_path / "runs" / name).mkdir(parents=True)
            address = {"host": "127.0.0.1", "rest_port": listener.getsockname()[1]}
            (tmp_path / "runs" / name / "gateway.json").write_text(json.dumps(address))
            return listener

        yield start


def test_the_run_that_is_up_is_found(runs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 2
    assert "no run is up in runs/; start one" in capsys.readouterr().err
    runs("killed").close()
    folder = Path("runs/next")
    folder.mkdir()
    (folder / "lock").write_text(str(os.getpid()))
    assert cli.main(["status"]) == 2
    assert (
        "the run in runs/next is starting or stopping, and its gateway is not up; try again" in capsys.readouterr().err
    )
    write_restarting(folder, {"rollout-0": "rollout-0 exited with code 1", "gateway": "gateway was killed by SIGKILL"})
    assert cli.main(["status"]) == 2
    why = "starting gateway, rollout-0 of the run in runs/next again (gateway was killed by SIGKILL; rollout-0 exited"
    assert why in capsys.readouterr().err
    write_restarting(folder, {})
    up = runs("demo-1")
    address = only_gateway()
    assert (address.run, address.url) == ("demo-1", f"http://127.0.0.1:{up.getsockname()[1]}")

    runs("demo-2")
    assert cli.main(["status"]) == 2
    error = capsys.readouterr().err
    assert "several runs are up (runs/demo-1, runs/demo-2); give --run-dir" in error


def test_a_file_that_is_not_text_is_not_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1\xff\xfe")
    assert cli.main(["doctor", "--config", str(tmp_path / "train.parquet")]) == 2
    assert "train.parquet is not YAML: it is not a text file" in capsys.readouterr().err


DEMO = Path(__file__).parents[2] / "examples" / "arithmetic" / "demo.yaml"


def test_the_demo_finds_its_files_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    async def run_demo(config: RunConfig) -> None:
        started.append(config)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock_tools.local.demo.run_demo", run_demo)
    assert cli.main(["demo", "--demo.heldout_file", "mine.parquet"]) == 0
    [config] = started
    assert (config.model.path / "config.json").is_file() and config.rollout.reward.function_file.is_file()
    assert config.demo.train_file.is_file() and config.demo.heldout_file == Path("mine.parquet")


def test_a_model_by_a_hub_name_that_the_cache_does_not_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert cli.main(["up", str(DEMO), "--check", "--model.path", "Qwen/Qwen2.5-0.5B-none"]) == 2
    assert "model.path: Qwen/Qwen2.5-0.5B-none is neither a path on this machine nor a" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["up", "rollout", "learner"])
def test_a_run_folder_that_cannot_be_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(DEMO.parents[2])
    folder = tmp_path / "file"
    folder.touch()
    words = [str(DEMO)] if name == "up" else ["--config", str(DEMO)]
    overrides = ["--redis.url", "redis://127.0.0.1:1", "--run_dir", str(folder)]
    assert cli.main([name, *words, *overrides]) != 0
    error = capsys.readouterr().err
    assert f"run_dir {folder} cannot be written to: Not a directory; set it to a writable folder" in error
    assert len(error.splitlines()) == 1


def test_an_export_of_what_is_not_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(["export", "--config", str(DEMO), "--output", str(out), "--checkpoint", str(tmp_path)]) == 2
    assert f"--checkpoint {tmp_path} is not a checkpoint; give a folder of RUN/checkpoints/" in capsys.readouterr().err
    assert not out.exists()


QUEUE = QueueStat(**dict.fromkeys(QueueStat.model_fields, 12345))
SERVERS = tuple(
    Server(
        server_id=f"rollout-{number}", address="http://a-rather-long-name.of.a.machine.example:12345", state="LOADING",
        policy_version=1234, heartbeat_age_ms=12345, running_groups=64, engine="sglang", weights_digest="0123456789ab",
        is_drained=False,
    )
    for number in (9, 10)
)  # fmt: skip
RUN = Run(
    run="a-run-with-a-name", step=1234, policy_version=1240, term=3, queue=QUEUE, servers=SERVERS, state="RUNNING",
    metrics=dict.fromkeys(("reward_mean", "staleness_mean", "tokens_per_second", "loss", "entropy"), 0.123456),
    held_version=None, detail="",
)  # fmt: skip


def test_top_fits_80_columns_with_a_line_for_each_server() -> None:
    series = {"penstock_heartbeat_age_seconds": {"learner": 1.0, "rollout-9": 2.0}}
    screen = io.StringIO()
    console = Console(file=screen, width=80)
    console.print(observe._draw(RUN, series, [0.1, 0.9]))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    [header] = [line for line in lines if line.startswith("server")]
    assert header.split() == ["server", "state", "version", "digest", "groups", "heartbeat", "engine"]
    rows = [line.split() for line in lines if line.startswith("rollout-") and "LOADING" in line]
    assert rows == [[f"rollout-{n}", "LOADING", "1234", "01234567", "64", "12.3", "s", "sglang"] for n in (9, 10)]
    assert "│" not in screen.getvalue() and "dead-lettered 12345" in " ".join(screen.getvalue().split())


def test_the_sparkline_of_top_starts_with_the_steps_before() -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        steps = [
            {"step": n, "policy_version": n, "published_at_ms": 1, "metrics": {"reward_mean": n / 4} if n else {}}
            for n in range(5)
        ]
        return httpx.Response(200, json={"steps": steps})

    with SyncPenstockClient("http://gateway", transport=httpx.MockTransport(respond)) as client:
        assert observe.rewards_of(client) == [0.25, 0.5, 0.75, 1.0]
    assert sparkline([0.25, 0.5, 0.75, 1.0], observe.HISTORY) == "▃▅▇█"


def test_top_verifies_the_certificate_of_metrics_as_that_of_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scrape(url: str, **options: Any) -> httpx.Response:
        scraped.append((url, options["verify"]))
        return httpx.Response(200, text="", request=httpx.Request("GET", url))

    trusted, scraped = ssl.create_default_context(), list[tuple[str, object]]()
    monkeypatch.setattr(httpx, "get", scrape)
    monkeypatch.setattr(observe, "rewards_of", lambda _: [])
    for url, tls, verify in (("https://a", trusted, trusted), ("https://a", None, True), ("http://a", None, False)):
        client = SyncPenstockClient(url, tls=tls)
        client.get_run = lambda: None
        observe._read(client)
        assert scraped[-1] == (f"{url}/metrics", verify)
        client.close()


def test_the_doctor_takes_the_folder_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--run-dir", str(tmp_path)]) == 2
    assert "has no config.yaml; give the folder of a run that was started" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("run: a\nmodle: {path: b}\n")
    assert cli.main(["doctor", "--run-dir", str(tmp_path)]) == 2
    assert str(tmp_path / "config.yaml") in capsys.readouterr().err


def test_the_table_of_policies_shows_snapshots_on_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    held = Policy(
        policy_version=450, step=450, parent_version=449, published_at_ms=1_700_000_000_000, weights_digest="0" * 32,
        snapshot_path="/runs/snapshots/version-450", state="PUBLISHED", metrics={"reward_mean": 0.5},
        server_ids=("rollout-0",), is_held=True, pins=(),
    )  # fmt: skip
    control.print_policies(held, held.model_copy(update={"policy_version": 449, "snapshot_path": "", "is_held": False}))
    head, first, marks, second = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "version",
        "step",
        "reward",
        "state",
        "snapshot",
        "digest",
        "published",
        "(UTC)",
        "served",
        "by",
    ]
    assert first.split()[3:5] == ["published", "kept"] and marks.split() == ["held"]
    assert second.split()[3:5] == ["published", "-"]
    assert all(len(line) <= 80 for line in (head, first, marks, second))
