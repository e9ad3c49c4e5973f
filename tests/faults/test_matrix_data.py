"""Rows of the fault matrix: data that is damaged, hostile or has no room."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis

from support.faults.matrix_run import FaultFree, MatrixRun
from support.faults.small_disk import fill, small_disk
from support.faults.steady_server import BROKEN_FILE
from support.fixtures import MakeRun

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
CHECKPOINTS, POISON, DISKS = "checkpoints", "poison and garbage", "disks"
NUM_FLIPPED = 64


def stop_for_good(run: MatrixRun, name: str) -> None:
    """SIGKILL to a part, without a new start."""
    run.parts[name].kill()


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        content = file.read(NUM_FLIPPED)
        file.seek(-len(content), os.SEEK_CUR)
        file.write(bytes(255 - byte for byte in content))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def largest_shard(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)


def ledger_file(checkpoint: Path) -> Path:
    return checkpoint / "trainer.json"


def forget_a_prompt(path: Path) -> None:
    """Change one number, so that the ledger is well-formed and no longer holds the first prompt."""
    text = path.read_text()
    changed = re.sub(r'("ledger": *\[\s*\[\s*)1\b', r"\g<1>2", text, count=1)
    assert changed != text
    path.write_text(changed)


@pytest.mark.parametrize(
    ("file_of", "damage"),
    [
        pytest.param(
            file_of,
            damage,
            marks=pytest.mark.fault_row(
                CHECKPOINTS, name, how=f"the learner is killed, {how}; later a backup is copied back",
                must="one line names the file; nothing is loaded, trained or published from it; then the run goes on",
            ),
        )
        for file_of, damage, name, how in (
            (largest_shard, flip, "bit rot in the newest", f"{NUM_FLIPPED} bytes of its largest shard are flipped"),
            (largest_shard, truncate, "the newest is truncated", "its largest shard is cut in half"),
            (ledger_file, truncate, "the newest ledger is truncated", "its trainer.json is cut in half"),
            (ledger_file, forget_a_prompt, "the newest ledger lacks a prompt", "one number of its ledger is changed"),
        )
    ],
)  # fmt: skip
def test_the_newest_checkpoint_is_damaged(
    make_run: MakeRun, fault_free: FaultFree, file_of: Callable[[Path], Path], damage: Callable[[Path], None]
) -> None:
    run = make_run()
    run.start_all()
    run.until(lambda: run.committed_step() >= 3, "a checkpoint")
    stop_for_good(run, "learner")
    step, newest = run.newest_checkpoint()
    is_committed = run.committed_step() == step
    damaged = file_of(newest)
    backup = shutil.copy2(damaged, run.config.run_dir / "backup")
    damage(damaged)
    before = run.stat()
    run.start("learner")
    run.until(lambda: damaged.name in run.log("learner"), "the learner to name the file", timeout_s=240)
    run.pause(5)
    after = run.stat()
    assert before is not None and after is not None
    if is_committed:  # Otherwise its groups are still in the queue, and the checkpoint before it is taken.
        assert (after.policy_version, after.step, after.trained) == (before.policy_version, before.step, before.trained)
    shutil.copy2(backup, damaged)
    run.fault()
    run.until_step(step + 2)
    run.recovered()
    run.stop_and_check(fault_free)


@pytest.mark.fault_row(
    POISON, "poison groups", how="bytes of two groups in Redis are overwritten while the learner is suspended",
    must="both are dead-lettered with the reason, and training goes on with the others",
)  # fmt: skip
def test_groups_in_redis_are_damaged(make_run: MakeRun) -> None:
    run = make_run()
    run.start_all()
    learner = run.parts["learner"]
    learner.stop()

    def waiting() -> int:
        stat = run.stat()
        return stat is not None and stat.queued - stat.delivered >= 2

    run.until(waiting, "groups that the learner has not taken")
    with contextlib.closing(redis.Redis.from_url(run.redis.url)) as client:
        by_id = sorted(
            client.scan_iter("*:group:*"), key=lambda key: [int(n) for n in key.split(b":")[-2:] if n.isdigit()]
        )
        damaged = by_id[-2:]
        for key in damaged:
            client.setrange(key, 12, b"damaged!")
    run.fault()
    learner.go_on()
    run.until(lambda: (stat := run.stat()) is not None and stat.dead_lettered == len(damaged), "dead letters")
    run.until_more_steps(2)
    run.recovered()
    run.stop_and_check(None)
    assert run.log("learner").count("is dead-lettered: ") == len(damaged)


@pytest.mark.fault_row(
    POISON, "every sample of a server is broken", how="the engine's log-probs are NaN for 20 s; max_attempts is 3",
    must="leasing pauses, no prompt loses its attempts, and the run goes on once the engine is well",
)  # fmt: skip
def test_every_sample_is_not_finite(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run(replay={"max_attempts": 3, "breaker": {"probe_s": 1.0}}, sample_s=0.2)
    broken = run.config.run_dir / "broken"
    run.start("feed", "learner")
    run.start_part("a", "support.faults.steady_server", environment={BROKEN_FILE: str(broken)})
    run.until_step(2)
    broken.touch()
    run.until(lambda: run.log("a").count("given back") >= 8, "failures")
    run.pause(20)
    stat = run.stat()
    assert stat is not None and stat.dead_lettered == 0
    step = run.step
    broken.unlink()
    run.fault()
    run.until_step(step + 2)
    run.recovered()
    run.stop_and_check(fault_free)


@pytest.mark.fault_row(
    POISON, "garbage on every port", how="random bytes, half requests and HTTP/2 frames to every listener",
    must="no process ends or hangs; the run goes on",
)  # fmt: skip
def test_garbage_is_sent_to_every_port(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run(seed=6)
    run.start("gateway")
    run.start_all()
    ports = {port for name in ("a", "b", "learner", "gateway") for port in listening(run, name)} - {run.redis.port}
    assert len(ports) >= 7, ports
    run.fault()
    for port in sorted(ports):
        for _ in range(10):
            send_garbage(port, run.random)
    run.until_more_steps(2)
    run.recovered()
    assert run.measured.restarts == {}, run.report("a part was started again")
    run.stop_and_check(fault_free)


def listening(run: MatrixRun, name: str) -> set[int]:
    ports = set()
    for process in run.parts[name].tree():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            connections = process.net_connections("tcp")
            ports |= {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    return ports


def send_garbage(port: int, dice: random.Random) -> None:
    opening = dice.choice(
        [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"POST /v1/"]
    )
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.settimeout(0.2)
        connection.sendall(opening + dice.randbytes(dice.randint(1, 4000)))
        with contextlib.suppress(TimeoutError):
            connection.recv(1000)


# ── disks ──


@pytest.mark.fault_row(
    DISKS, "no room for checkpoints", how="the disk of the checkpoints, a tmpfs, is filled; later there is room again",
    must="the learner says so; no checkpoint is half-written; nothing is lost",
)  # fmt: skip
def test_the_disk_of_the_checkpoints_is_full(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run()
    with small_disk(run.config.folder / "checkpoints", 64 * 2**20) as folder:
        run.start_all()
        filler = fill(folder)
        run.until(lambda: "space" in run.log("learner") or "disk" in run.log("learner"), "a word about the disk")
        filler.unlink()
        step = run.step
        run.fault()
        run.until_step(step + 2)
        run.recovered()
        run.stop_and_check(fault_free)
        for path in run.config.folder.glob("checkpoints/term-*/trainer.json"):
            json.loads(path.read_text())
