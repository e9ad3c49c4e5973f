"""A learner is killed at a named point. Its successor ends in the same state, and no group is trained twice or lost.

In `make test`, test_learner_run.py kills one at `after_flush`, and test_learner_rewinds.py, test_backup.py and
test_replay_chaos.py kill one without a model at the other points.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.run import RunConfig
from penstock_learner.crash_points import NAMES
from support.learner_runs import (
    GROUPS_PER_STEP,
    KILLED,
    NUM_STEPS,
    Outcome,
    fill_queue,
    forget_run,
    make_config,
    outcome,
    ppo,
    queue_stat,
    run_learner,
)
from support.object_store import ObjectStore, in_environment, object_store
from support.redis_server import RedisProcess

LATE = {"after_read": "after_read:3", "mid_step": "mid_step:3"}
"""Every step passes these crash points. The third time comes after a checkpoint."""
ALL_IN_TURN = (LATE["after_read"], "mid_step", "before_flush", "after_flush", "after_commit")
"""Each learner gets further than the one before: the last one dies after its last checkpoint."""


@pytest.fixture(scope="module")
def configure(tiny_models: dict[str, Path], redis_process: RedisProcess) -> Callable[[Path, str, str], RunConfig]:
    """Makes the config of a run from its folder, algorithm and name."""
    settings: dict[str, dict[str, Any]] = {"grpo": {}, "ppo": ppo(tiny_models["scalar"], num_ranks=1)}
    return lambda folder, algorithm, run: make_config(
        folder, tiny_models["policy"], redis_process.url, run, **settings[algorithm]
    )


def undisturbed(
    folder: Path, configure: Callable[[Path, str, str], RunConfig], algorithm: str
) -> tuple[RunConfig, Outcome]:
    config = configure(folder, algorithm, f"undisturbed-{algorithm}")
    asyncio.run(fill_queue(config))
    code, output = run_learner(config)
    assert code == 0, output[-3000:]
    return config, outcome(config)


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory, configure: Any) -> tuple[RunConfig, Outcome]:
    return undisturbed(tmp_path_factory.mktemp("grpo"), configure, "grpo")


@pytest.fixture(scope="module")
def ppo_with_critic(tmp_path_factory: pytest.TempPathFactory, configure: Any) -> tuple[RunConfig, Outcome]:
    return undisturbed(tmp_path_factory.mktemp("ppo"), configure, "ppo")


def killed_and_continued(config: RunConfig, crash_at: str) -> Outcome:
    asyncio.run(fill_queue(config))
    code, output = run_learner(config, LATE.get(crash_at, crash_at))
    assert code == KILLED, output[-3000:]
    code, output = run_learner(config)
    assert code == 0, output[-3000:]
    return outcome(config)


def check_equal(recovered: Outcome, whole: Outcome, num_terms: int = 2) -> None:
    assert recovered.state_hashes == whole.state_hashes
    assert recovered.digests[NUM_STEPS] == whole.digests[NUM_STEPS]
    assert recovered.ledger == whole.ledger == [[1, GROUPS_PER_STEP * NUM_STEPS]]
    assert recovered.stat.trained == GROUPS_PER_STEP * NUM_STEPS
    assert recovered.stat.conservation_error == 0
    assert recovered.stat.term == num_terms
    assert recovered.feed_positions == {"train": GROUPS_PER_STEP * NUM_STEPS}


@pytest.mark.timeout(900)
@pytest.mark.fault_row(
    "learner", "killed at every named point", how="crash points after_read, mid_step, before_flush, after_flush, "
    "after_commit, one after the other", must="the final state equals that of a run without faults",
)  # fmt: skip
@pytest.mark.long
def test_a_learner_killed_at_every_point_in_turn_is_continued_exactly(
    tmp_path: Path, configure: Any, grpo: tuple[RunConfig, Outcome]
) -> None:
    assert [place.partition(":")[0] for place in ALL_IN_TURN] == list(NAMES)
    check_killed_in_turn(configure(tmp_path, "grpo", "grpo-all-in-turn"), ALL_IN_TURN, grpo[1])


def check_killed_in_turn(config: RunConfig, places: tuple[str, ...], whole: Outcome) -> None:
    asyncio.run(fill_queue(config))
    for crash_at in places:
        code, output = run_learner(config, crash_at)
        assert code == KILLED, (crash_at, output[-3000:])
    code, output = run_learner(config)
    assert code == 0, output[-3000:]
    check_equal(outcome(config), whole, num_terms=len(places) + 1)


@pytest.mark.long
@pytest.mark.parametrize("crash_at", NAMES)
def test_a_killed_learner_is_continued_exactly(
    crash_at: str, tmp_path: Path, configure: Any, grpo: tuple[RunConfig, Outcome]
) -> None:
    _, whole = grpo
    check_equal(killed_and_continued(configure(tmp_path, "grpo", f"grpo-{crash_at}"), crash_at), whole)


@pytest.mark.long
@pytest.mark.parametrize("crash_at", NAMES)
def test_a_killed_learner_with_a_critic_is_continued_exactly(
    crash_at: str, tmp_path: Path, configure: Any, ppo_with_critic: tuple[RunConfig, Outcome]
) -> None:
    _, whole = ppo_with_critic
    assert whole.state_hashes.keys() == {"policy", "critic"}
    recovered = killed_and_continued(configure(tmp_path, "ppo", f"ppo-{crash_at}"), crash_at)
    check_equal(recovered, whole)
    assert recovered.critic_losses[-1] == whole.critic_losses[-1]


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as store, in_environment(store):
        yield store


def uploading(config: RunConfig) -> RunConfig:
    checkpoint = config.learner.checkpoint.model_copy(update={"upload": "s3://bucket/checkpoints"})
    return config.model_copy(update={"learner": config.learner.model_copy(update={"checkpoint": checkpoint})})


def lose_folder(config: RunConfig) -> None:
    """Lose everything that a learner keeps on its disk, as when its node is gone. The test reads the metrics."""
    shutil.rmtree(config.folder / "checkpoints")


@pytest.mark.long  # unit tests of uploads have a sibling of every part
def test_a_learner_without_its_disk_continues_exactly_from_object_storage(
    tmp_path: Path, configure: Any, grpo: tuple[RunConfig, Outcome], store: ObjectStore
) -> None:
    config = uploading(configure(tmp_path, "grpo", "uploaded"))
    asyncio.run(fill_queue(config))
    code, output = run_learner(config, "after_upload")
    assert code == KILLED, output[-3000:]
    assert queue_stat(config).trained == 0, "nothing is acknowledged yet"
    lose_folder(config)
    code, output = run_learner(config)
    assert code == 0 and "fetching term-000001-step-00000002" in output, output[-3000:]
    check_equal(outcome(config), grpo[1])
    names = {key.split("/")[2] for key in store.list_keys("checkpoints/uploaded/")}
    assert names == {"term-000001-step-00000002", "term-000002-step-00000004"}


@pytest.mark.long
def test_half_an_upload_counts_for_nothing(
    tmp_path: Path, configure: Any, grpo: tuple[RunConfig, Outcome], store: ObjectStore
) -> None:
    config = uploading(configure(tmp_path, "grpo", "half-uploaded"))
    asyncio.run(fill_queue(config))
    code, output = run_learner(config, "mid_upload:2")
    assert code == KILLED, output[-3000:]
    assert queue_stat(config).trained == 2 * GROUPS_PER_STEP, "only what the first upload covers"
    half = "checkpoints/half-uploaded/term-000001-step-00000004"
    assert store.list_keys(half) and f"{half}/manifest.json" not in store.list_keys(half)
    lose_folder(config)
    code, output = run_learner(config)
    assert code == 0 and "fetching term-000001-step-00000002" in output, output[-3000:]
    check_equal(outcome(config), grpo[1])
    assert not store.list_keys(half), "what a crash has left is removed"


@pytest.mark.long
def test_a_checkpoint_that_was_not_uploaded_is_uploaded_before_its_groups_are_acknowledged(
    tmp_path: Path, configure: Any, grpo: tuple[RunConfig, Outcome], store: ObjectStore
) -> None:
    config = uploading(configure(tmp_path, "grpo", "uploaded-later"))
    asyncio.run(fill_queue(config))
    code, output = run_learner(config, "mid_upload")
    assert code == KILLED and queue_stat(config).trained == 0, output[-3000:]
    code, output = run_learner(config)  # it still has its disk
    assert code == 0 and "continuing from" in output, output[-3000:]
    check_equal(outcome(config), grpo[1])
    assert "checkpoints/uploaded-later/term-000001-step-00000002/manifest.json" in store.list_keys()


@pytest.mark.long
def test_a_damaged_upload_is_found_and_not_trained_from(tmp_path: Path, configure: Any, store: ObjectStore) -> None:
    config = uploading(configure(tmp_path, "grpo", "damaged-upload"))
    asyncio.run(fill_queue(config))
    code, output = run_learner(config)
    assert code == 0, output[-3000:]
    (shard,) = (
        key for key in store.list_keys() if key.startswith("checkpoints/damaged-upload/term-000001-step-00000004/__0")
    )
    content = bytearray(store.get(shard))
    content[len(content) // 2] ^= 1
    store.put(shard, bytes(content))
    lose_folder(config)
    code, output = run_learner(config)
    assert code == 1
    assert "term-000001-step-00000004 cannot be used" in output and "expected checksum" in output
    assert "term-000001-step-00000002 is at step 2, but step 4 is committed" in output, "it refuses to lose steps"


@pytest.mark.fault_row(
    "Redis", "has lost the run", how="every key of the run is deleted", must="the learner refuses it and says why"
)
@pytest.mark.long
def test_a_redis_that_lost_the_run_is_refused_unless_training_begins_again(grpo: tuple[RunConfig, Outcome]) -> None:
    """Prompt ids would start again at 1, but the ledger already holds these ids."""
    config, whole = grpo
    assert whole.feed_positions == {"train": GROUPS_PER_STEP * NUM_STEPS}
    asyncio.run(forget_run(config))
    code, output = run_learner(config)
    assert code == 1
    assert "this Redis is not the one that the checkpoint was written with, or it has lost its data" in output

    checkpoint = config.learner.checkpoint.model_copy(update={"resume": "off"})
    learner = config.learner.model_copy(update={"checkpoint": checkpoint})
    anew = config.model_copy(update={"learner": learner})
    asyncio.run(fill_queue(anew))
    code, output = run_learner(anew)
    assert code == 0 and "continuing from" not in output, output[-3000:]
    again = outcome(anew)
    assert (again.losses, again.state_hashes) == (whole.losses, whole.state_hashes)
