"""A damaged checkpoint is never loaded, whichever file is damaged, and one line says which file it was."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from penstock.config.algorithms import KLConfig
from penstock.config.learner import CheckpointConfig
from penstock.config.loading import validate
from penstock.config.service import ReplayConfig
from penstock.errors import CheckpointDamaged, ConfigError, DiskFull, ProcessDied, TrainingDiverged
from penstock.machine import folder_bytes
from penstock_learner.checkpoints import MANIFEST_FILE, TRAINER_FILE, CheckpointStore
from penstock_learner.loop.step_loop import CheckpointWriter
from penstock_learner.loop.take_over import choose_checkpoint, load_checkpoint, take_over
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.roles.critic import CriticWorker
from penstock_learner.roles.policy import PolicyWorker
from penstock_learner.term import Term, TrainerState
from support.learner_ranks import make_rank, with_model
from support.memory_queue import MemoryReplayQueue
from support.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("one_rank")
FILES = [".metadata", "__0_0.distcp", "critic/.metadata", "critic/__0_0.distcp", MANIFEST_FILE, TRAINER_FILE]


class OneRank:
    """A role with one rank in this process, called as a RoleGroup is."""

    num_ranks = 1

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    async def call_all(self, method: str, *arguments: Any) -> list[Any]:
        return [await self.call_rank(0, method, *arguments)]

    async def call_all_in_lane(self, lane: str, method: str, *arguments: Any) -> list[Any]:
        return [await self.call_rank(0, method, *arguments)]

    async def call_rank(self, rank: int, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.worker, method)(*arguments)
        except OSError as error:  # as RoleGroup reports the errors of a rank
            raise ProcessDied(f"{method} failed: {error}") from error


class NoQueue:
    async def commit(self, step: int, prompt_ids: Sequence[int], oldest_step: int) -> None:
        pass


@pytest.fixture
def roles(tiny_models: dict[str, Path]) -> dict[str, Any]:
    learner = {"critic": {"path": str(tiny_models["scalar"])}, "algorithm": {"advantage": {"name": "gae"}}}
    config = validate(with_model({"learner": learner}, tiny_models["policy"]), "test")
    return {"policy": OneRank(make_rank(PolicyWorker, config)), "critic": OneRank(make_rank(CriticWorker, config))}


def save(folder: Path, roles: dict[str, Any], step: int) -> Path:
    """Write a checkpoint of the roles' present weights, as training does."""
    store = CheckpointStore(folder, keep=5)

    async def write() -> None:
        metrics = LearnerMetrics(CollectorRegistry(), "standalone")
        queue: Any = NoQueue()
        writer = CheckpointWriter(store, queue, roles, metrics, Term(), on_durable=lambda: None)
        await writer.begin(TrainerState(step, step, 1, [(1, step)]), [])
        await writer.wait_until_written()

    asyncio.run(write())
    return store.newest_first()[0]


def weights(roles: dict[str, Any]) -> list[torch.Tensor]:
    return [parameter.detach().clone() for role in roles.values() for parameter in role.worker.trained.parameters()]


def move(roles: dict[str, Any]) -> None:
    """Change the weights, so that a restored checkpoint differs."""
    with torch.no_grad():
        for role in roles.values():
            for parameter in role.worker.trained.parameters():
                parameter.add_(1.0)


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def flip(file: Path, position: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(position * (len(content) - 1))] ^= 0x10
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "first byte": lambda file: flip(file, 0),
    "middle byte": lambda file: flip(file, 0.5),
    "last byte": lambda file: flip(file, 1),
    "truncated": truncate,
    "empty": lambda file: file.write_bytes(b""),
    "missing": Path.unlink,
}


def test_damage_to_any_file_is_found_before_a_role_changes(tmp_path: Path, roles: dict[str, Any]) -> None:
    saved = weights(roles)
    good = save(tmp_path / "run", roles, step=4)
    assert sorted(str(path.relative_to(good)) for path in good.rglob("*") if path.is_file()) == sorted(FILES)
    move(roles)
    moved = weights(roles)
    for name in FILES:
        for damage, apply in DAMAGES.items():
            copy = tmp_path / "copy" / good.name
            shutil.copytree(good, copy)
            apply(copy / name)
            with pytest.raises(CheckpointDamaged) as caught:
                asyncio.run(load_checkpoint(copy, roles))
            message = str(caught.value)
            assert str(copy / name) in message and "\n" not in message, (name, damage, message)
            assert name == TRAINER_FILE or damage == "missing" or ("expected" in message and "found" in message), (
                name, damage, message,
            )  # fmt: skip
            assert same(weights(roles), moved), (name, damage)
            shutil.rmtree(copy)
    asyncio.run(load_checkpoint(good, roles))
    assert same(weights(roles), saved)


def test_the_one_before_a_damaged_checkpoint_is_taken(
    tmp_path: Path, roles: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, roles, step=4)
    saved = weights(roles)
    move(roles)
    newest = save(tmp_path, roles, step=5)
    flip(newest / "critic" / "__0_0.distcp", 0.5)
    store = CheckpointStore(tmp_path, keep=5)

    async def taken_over(queue: MemoryReplayQueue) -> Term:
        async def load(path: Path) -> None:
            await load_checkpoint(path, roles)

        chosen = await choose_checkpoint(queue, store, CheckpointConfig())
        return await take_over(queue, store, CheckpointConfig(), chosen, load, 0, KLConfig())

    queue = MemoryReplayQueue(MemoryStore(), ReplayConfig())
    queue.store.counters["next_prompt_id"] = 5
    assert asyncio.run(taken_over(queue)).step == 4 and same(weights(roles), saved)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert f"{newest.name} cannot be used: {newest / 'critic' / '__0_0.distcp'} is damaged: expected checksum" in line
    asyncio.run(queue.commit(5, [5]))
    message = r"step-00000004 is at step 4, but step 5 is committed; newer .* damaged: .*critic/__0_0.distcp.*rewind"
    with pytest.raises(ConfigError, match=message):
        asyncio.run(taken_over(queue))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_neither_written_nor_loaded(
    tmp_path: Path, roles: dict[str, Any], value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = roles["critic"].worker
    with torch.no_grad():
        list(worker.trained.parameters())[1].view(-1)[3] = value
    with pytest.raises(TrainingDiverged, match=r"the critic's model\..* is not finite, so .* is not written"):
        save(tmp_path / "refused", roles, step=4)
    roles["policy"].worker.finish_saving()  # it began before the critic refused
    assert CheckpointStore(tmp_path / "refused", keep=5).newest_first() == []
    with monkeypatch.context() as patch:
        patch.setattr(CriticWorker, "_first_nonfinite", lambda self, state: "")
        checkpoint = save(tmp_path / "forced", roles, step=4)
    with pytest.raises(CheckpointDamaged, match=r"critic holds weights that are not finite: model\."):
        asyncio.run(load_checkpoint(checkpoint, roles))


def test_numbers_of_the_optimizer_that_are_not_finite_are_not_written(tmp_path: Path, roles: dict[str, Any]) -> None:
    """They would make the weights of the next step NaN, even though its gradient is finite."""
    worker = roles["policy"].worker
    for parameter in worker.trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    worker.optimizer.step()
    next(iter(worker.optimizer.state.values()))["exp_avg"].view(-1)[0] = float("inf")
    with pytest.raises(TrainingDiverged, match=r"the policy's optimizer\..*exp_avg is not finite"):
        save(tmp_path, {"policy": roles["policy"]}, step=4)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_without_space_for_the_next_checkpoint(tmp_path: Path, roles: dict[str, Any]) -> None:
    """The first checkpoint fits, the second does not: it is named in one line, and the first stays usable."""
    size = folder_bytes(save(tmp_path / "elsewhere", roles, 1))
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size * 3 // 2}", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no mounts")
    try:
        first = save(disk, roles, 1)
        with pytest.raises(DiskFull, match="no space is left to write term-000001-step-00000002") as raised:
            save(disk, roles, 2)
        assert "\n" not in str(raised.value)
        assert list(disk.iterdir()) == [first], "the partial folder is gone"
        asyncio.run(load_checkpoint(first, roles))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
