"""A run on several machines: what the first one writes, and what another one makes of it. Nothing is started."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli import main as cli
from penstock.config.learner import LearnerConfig
from penstock.config.loading import load_config, validate
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock_tools.local import commands, join
from penstock_tools.local.join import Joined, opened, ray_head_command, starts_ray_head, write_join_file
from penstock_tools.local.local_run import STOP_CALLS
from penstock_tools.local.private_redis import kept_port, write_config
from penstock_tools.local.processes import Child, ProcessGroup
from support.processes import until

DEPLOY = Path(__file__).parents[2] / "deploy"
HOST = "127.0.0.2"
"""Stands for the address of the first machine."""


@pytest.fixture(autouse=True)
def own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "port_is_free", lambda host, port: host == HOST)


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """`join` takes over the signals of its process, which here is that of all tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def make_config(tmp_path: Path, **learner: str) -> RunConfig:
    (tmp_path / "cluster.key").write_text("the cluster key")
    data = {"run": "math", "run_dir": str(tmp_path / "runs"), "model": {"path": "m"}, "learner": learner}
    config = opened(validate(data, "test"), HOST, tmp_path / "cluster.key")
    return config.changed({"redis.url": f"redis://:secret@{HOST}:7000/0"})


def joined(file: Path, *overrides: str, is_ray_node: bool = False) -> Joined:
    return Joined(file, overrides, num_servers=2, is_ray_node=is_ray_node)


def test_the_first_machine_is_reached_at_its_address(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert (config.rollout.host, config.learner.publish_host) == (HOST, HOST)
    for host, url, message in (
        ("192.0.2.77", "", "192.0.2.77 is not an address of this machine"),
        ("0.0.0.0", "", "0.0.0.0 is not an address of this machine"),
        (HOST, "redis://localhost:6379/0", "redis.url is reachable from this machine only"),
        (HOST, "unix:///run/redis", "redis.url is reachable from this machine only"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(validate({"model": {"path": "m"}, "redis": {"url": url}}, "test"), host, tmp_path)


def test_the_private_redis_keeps_its_port_and_listens_for_others_only_if_asked(tmp_path: Path) -> None:
    assert kept_port(tmp_path) == 0
    file, url = write_config(tmp_path, 7000, host="10.0.0.1")
    assert "bind 127.0.0.1 10.0.0.1" in file.read_text().splitlines() and url.endswith("@10.0.0.1:7000/0")
    assert kept_port(tmp_path) == 7000
    file, url = write_config(tmp_path, 7000)
    assert "bind 127.0.0.1" in file.read_text().splitlines() and url.endswith("@127.0.0.1:7000/0")


def test_another_machine_gets_config_and_keys_by_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "address_towards", lambda host, port: {(HOST, 7000): "10.0.0.7"}[host, port])
    monkeypatch.setattr(ProcessGroup, "start", lambda *_, **__: None)
    monkeypatch.setattr(Joined, "_watch", lambda *_: None)
    (tmp_path / "token").write_text("the token")
    config = make_config(tmp_path, ray_address=f"{HOST}:6380")
    assert starts_ray_head(config, HOST) and not starts_ray_head(config, "127.0.0.3")
    assert {"--port=6380", "--temp-dir=/tmp/x/r"} <= set(ray_head_command(config, HOST, "/tmp/x"))
    file = write_join_file(config, tmp_path / "token")
    assert file.stat().st_mode & 0o777 == 0o600
    here = joined(file, "--run_dir", str(tmp_path / "elsewhere"), "--model.path", "/data/m")
    here.run()
    assert here.folder == tmp_path / "elsewhere" / "math" / "hosts" / here.name
    found = load_config(here.folder / "config.yaml")
    assert (found.rollout.host, found.redis.url, str(found.model.path)) == ("10.0.0.7", config.redis.url, "/data/m")
    assert found.weights.cluster_key_file is not None
    assert found.weights.cluster_key_file.read_text() == "the cluster key"
    assert (here.folder / "keys" / "ray_token").read_text() == "the token"
    written = [path for path in here.folder.rglob("*") if path.is_file() and path.name != "lock"]
    assert written and all(path.stat().st_mode & 0o777 == 0o600 for path in written)
    assert joined(file, "--rollout.host", "10.9.9.9").host == "10.9.9.9"


def test_a_file_that_gives_keys_away_or_has_none_is_refused(tmp_path: Path) -> None:
    file = write_join_file(make_config(tmp_path), None)
    with pytest.raises(ConfigError, match="private Ray, which no machine can join; .*--learner.ray_address HOST:PORT"):
        joined(file, is_ray_node=True)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="other users of this machine can read it; run `chmod 600"):
        joined(file)
    file.write_text(yaml.safe_dump({"config": {"model": {"path": "m"}}, "keys": {"gateway.api_key_file": "k"}}))
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a whole join file; copy join.yaml"):
        joined(file)


def test_a_copy_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    file = write_join_file(make_config(tmp_path), None)
    text = file.read_text()
    assert joined(file).config.run == "math"
    for end in (*range(text.index("the cluster key"), len(text) - 1), len(text) // 2):
        file.write_text(text[:end])
        with pytest.raises(ConfigError):
            joined(file)


def test_a_machine_joins_a_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessGroup, "start", lambda *_, **__: None)
    file = write_join_file(make_config(tmp_path), None)

    def join_again(first: Joined, *_: object) -> None:
        with pytest.raises(ConfigError, match="this machine has joined run math already"):
            joined(file, "--model.path", "another").run()
        assert str(load_config(first.folder / "config.yaml").model.path) == "m", "the first one's processes read it"

    monkeypatch.setattr(Joined, "_watch", join_again)
    joined(file).run()


def test_a_machine_joins_again_once_the_processes_of_a_killed_command_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessGroup, "start", lambda *_, **__: None)
    here = joined(write_join_file(make_config(tmp_path), None))
    has_joined = list[Joined]()
    monkeypatch.setattr(Joined, "_watch", lambda self, *_: has_joined.append(self))
    here.folder.mkdir(parents=True)
    with subprocess.Popen(["true"]) as killed:
        killed.wait(60)
    with (here.folder / "lock").open("w") as lock:
        lock.write(str(killed.pid))
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(join, "ORPHANS_S", 0.0)
        with pytest.raises(ConfigError, match="this machine has joined run math already"):
            here.run()
        monkeypatch.setattr(join, "ORPHANS_S", 60.0)
        tries, try_lock = list[object](), join.try_lock

        def try_and_end(*words: Any) -> Any:
            tries.append(found := try_lock(*words))
            fcntl.flock(lock, fcntl.LOCK_UN)
            return found

        monkeypatch.setattr(join, "try_lock", try_and_end)
        here.run()
    assert has_joined == [here] and tries[0] is None


def test_a_second_ctrl_c_kills_the_processes_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = list[Child]()

    def start(_: Joined, processes: ProcessGroup, *__: object) -> None:
        script = f"trap '' TERM; touch {tmp_path}/up; while :; do sleep 0.02; done"
        children.append(processes.start("one", ["sh", "-c", script], stop_timeout_s=1000))
        until((tmp_path / "up").exists, "the process")

    def interrupt(_: Joined, __: ProcessGroup, stopping: threading.Event) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping.is_set() and children[0].exit_code is None
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Joined, "_start", start)
    monkeypatch.setattr(Joined, "_watch", interrupt)
    joined(write_join_file(make_config(tmp_path), None)).run()
    assert children[0].exit_code == -signal.SIGKILL


def test_a_number_of_servers_is_at_least_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["join", "join.yaml", "--servers", "0"]) == 2
    assert "--servers: must be at least 1, not 0" in capsys.readouterr().err
    assert cli.main(["join", "join.yaml", "--servers", "2", "--ray-node"]) == 2
    assert "cannot be combined with" in capsys.readouterr().err


# ── deploy/slurm and deploy/systemd ──


def test_the_commands_of_the_units_and_of_the_sbatch_script_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command line is parsed by the command itself, as far as reading its files."""
    lines = {
        unit.name: [line.partition("=")[2] for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
        for unit in (DEPLOY / "systemd").glob("*.service")
    }
    script = (DEPLOY / "slurm" / "penstock.sbatch").read_text()
    lines["penstock.sbatch"] = re.findall(r"(?:^|\s)(penstock (?:up|join) .*?) &$", script, re.MULTILINE)
    assert {name: len(found) for name, found in lines.items()} == {
        "penstock-up@.service": 1, "penstock-join@.service": 1, "penstock.sbatch": 2,
    }  # fmt: skip
    for name, line in [(name, line) for name, found in lines.items() for line in found]:
        words = shlex.split(re.sub(r'"?\$@"?', "", line).replace("$PENSTOCK_JOIN", "--ray-node"))
        assert words[0].endswith("penstock"), name
        with pytest.raises(ConfigError, match="config file .* does not exist"):
            {"up": commands.up, "join": commands.join}[words[1]](words[2:])
    assert {"up", "join"} <= cli.COMMANDS.keys()


def test_systemd_waits_for_the_checkpoint_as_long_as_up_does() -> None:
    unit = (DEPLOY / "systemd" / "penstock-up@.service").read_text()
    (timeout_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(timeout_s) > STOP_CALLS * LearnerConfig().rank_timeout_s


def test_shell_and_systemd_accept_the_files(tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", str(DEPLOY / "slurm" / "penstock.sbatch")], check=True, timeout=30)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in (DEPLOY / "systemd").glob("*.service"):
        here = tmp_path / unit.name.replace("@", "@run")
        # The program and the user of the unit do not exist on this machine.
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
        here.write_text(text.replace("User=penstock\n", ""))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(here)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        complaints = [line for line in done.stderr.splitlines() if unit.name.partition("@")[0] in line]
        assert not complaints, complaints
