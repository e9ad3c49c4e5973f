"""Taking over a run: a learner chooses a checkpoint, takes a new term, and continues from the checkpoint.

The controller chooses once, before any role starts (`choose_checkpoint`). A choice that is refused ends the learner
before it has fenced anyone. Until the term is taken, the learner before this one may still finish checkpoints and
commit. If it has, the choice is made again; otherwise the chosen checkpoint is loaded. Once the term is taken, no one
else can commit.

    newest checkpoint ─► does it cover every committed group? ─► load it, which verifies its files ─► rewind the queue
         ▲                 │ no: refuse it, or rewind if            │
         └ the one before ◄┼────────────────────────────────────────┘ damaged: name the file
                           └ `checkpoint.rewind` asks for it: the queue undoes the commits that it does not cover

This rewind is one atomic call, which also records the checkpoint and the term. A crash before it changes nothing, and
nothing is trained before Redis can no longer lose it. After it, a learner with any config continues from that
checkpoint or from later ones, and never from those it abandoned. Within a term an operator may also order to rewind to
a version (`load_version`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config.algorithms import KLConfig
from penstock.config.learner import CheckpointConfig
from penstock.errors import CheckpointDamaged, ConfigError, NotFound, Unavailable, WeightPushFailed
from penstock.replay.queue import GroupConsumer
from penstock.replay.queue_types import Committed, RunRewind
from penstock.store.fleet import PolicyRegistry
from penstock_learner.checkpoints import (
    CheckpointStore,
    raise_if_damaged,
    read_manifest,
    read_state,
    record_rewind,
    shards_folder,
)
from penstock_learner.crash_points import crash_point
from penstock_learner.roles.role_group import RoleGroup, gather_all
from penstock_learner.term import Ledger, RewindCause, Term, TrainerState, make_kl_controller

logger = logging.getLogger(__name__)
Load = Callable[[Path], Awaitable[None]]
"""Loads the weights of a checkpoint. Raises CheckpointDamaged if a file is damaged."""


@dataclass(frozen=True)
class ChosenCheckpoint:
    """The state to continue from, and its checkpoint. Without one, the roles keep the weights of the model folder."""

    checkpoint: Path | None
    state: TrainerState
    uncovered: list[int]
    """Committed prompts that the state was not trained on. The run must be rewound to use it."""
    committed: Committed
    """What was committed when the checkpoint was chosen."""
    store_id: str
    """The store that this was read from. A ledger stands for the prompts of one store only."""
    newest: Path | None
    """The first candidate: the chosen checkpoint, unless that one is damaged."""

    @property
    def path(self) -> str:
        return str(self.checkpoint.absolute()) if self.checkpoint else ""

    def is_target_of(self, rewind: RunRewind | None) -> bool:
        return rewind is not None and rewind.checkpoint == self.path


async def take_over(
    queue: GroupConsumer, checkpoints: CheckpointStore, config: CheckpointConfig, chosen: ChosenCheckpoint, load: Load,
    loss_window_s: float, kl: KLConfig,
) -> Term:  # fmt: skip
    """Fence every earlier learner, then load the chosen checkpoint, or a newer one that the learner before has finished
    since, rewind to it if the config asks for that, and bring the queue to its state. A checkpoint that no longer
    covers all committed groups, or that is of another store than the one found now, is refused before the term is
    taken: such a learner fences no one."""
    choice = await _unless_changed(queue, checkpoints, config, chosen)
    term = await queue.take_term(await asyncio.to_thread(checkpoints.newest_term))
    # Redis could still lose the new term, and the term before it would be valid again. So wait before acting under it.
    await asyncio.sleep(loss_window_s)
    choice = await _unless_changed(queue, checkpoints, config, choice)
    damaged: dict[Path, str] = {}
    while choice.checkpoint is not None and not await _is_loaded(choice.checkpoint, load, damaged):
        choice = await choose_checkpoint(queue, checkpoints, config, damaged)
    if choice.checkpoint is not None:
        # Its learner may have died before the upload. The groups that it covers are acknowledged next.
        await asyncio.to_thread(checkpoints.upload, choice.checkpoint)
    rewind = choice.committed.rewind  # only the learner of the current term changes it
    if choice.uncovered or (_asks_for(config, choice) and not choice.is_target_of(rewind)):
        await _rewind_run(queue, checkpoints, choice, term)
        await asyncio.sleep(loss_window_s)
        rewind = (await queue.committed()).rewind
        if not choice.is_target_of(rewind):
            raise Unavailable("Redis has lost the rewind of the run; start the learner again, and it rewinds again")
    await asyncio.to_thread(record_rewind, checkpoints.folder, term, rewind, is_done=True)
    checkpoints.rewind = rewind
    state = choice.state
    cause: RewindCause = "restart"
    if rewind is not None and choice.is_target_of(rewind):
        # Rewinds that were ordered before belong to the steps that were abandoned.
        state, cause = replace(state, num_orders=rewind.num_orders, resumed_from=rewind.checkpoint), "order"
    manifests = await _rewind_batches(queue, state)
    return Term(
        number=term,
        store_id=choice.store_id,
        step=state.step,
        policy_version=state.policy_version,
        ledger=Ledger(state.ledger),
        kl=make_kl_controller(kl, state.kl_coefficient),
        resumed_from=state.resumed_from,
        num_orders=state.num_orders,
        lineage=state.lineage,
        cause=cause,
        manifests=manifests,
        num_overdue=await _count_overdue(queue, manifests),
    )


async def choose_checkpoint(
    queue: GroupConsumer, checkpoints: CheckpointStore, config: CheckpointConfig,
    damaged: Mapping[Path, str] | None = None,
) -> ChosenCheckpoint:  # fmt: skip
    """The checkpoint to continue from: the newest one that may be used and is not `damaged`, as far as its trainer
    state says, fetched if it was uploaded. Fences no one. Raises ConfigError if it does not cover all committed groups
    or belongs to another store or another tokenizer, and CheckpointDamaged if none is intact."""
    store_id, damaged = await queue.store_id(), dict(damaged or {})
    # Read first: a commit that comes between the two reads belongs to a checkpoint that the second one sees.
    committed = await queue.committed()
    for path in await asyncio.to_thread(checkpoints.candidates, config.resume, committed.rewind):
        if path in damaged:
            continue
        try:
            state = await asyncio.to_thread(read_state, path)
            state.check_tokenizer(checkpoints.tokenizer)
            return _checked(path, state, committed, config, store_id, damaged)
        except CheckpointDamaged as error:
            logger.error("checkpoint %s cannot be used: %s", path.name, error)
            damaged[path] = str(error)
    if damaged:
        raise CheckpointDamaged(f"no checkpoint is intact: {_listed(damaged)}; restore the files from a backup")
    return _checked(None, TrainerState(), committed, config, store_id, damaged)


async def _unless_changed(
    queue: GroupConsumer, checkpoints: CheckpointStore, config: CheckpointConfig, chosen: ChosenCheckpoint
) -> ChosenCheckpoint:
    """The choice, which is made again only if a checkpoint was finished or committed since, or if this is another store
    now."""
    if await queue.store_id() == chosen.store_id and await queue.committed() == chosen.committed:
        found = await asyncio.to_thread(checkpoints.candidates, config.resume, chosen.committed.rewind)
        if next(iter(found), None) == chosen.newest:
            return chosen
    logger.info("the run has changed since the checkpoint was chosen; choosing again")
    return await choose_checkpoint(queue, checkpoints, config)


async def _is_loaded(path: Path, load: Load, damaged: dict[Path, str]) -> bool:
    """Load the checkpoint. If it is damaged, say so and add it to `damaged`."""
    logger.info("continuing from %s", path)
    try:
        await load(path)
        return True
    except CheckpointDamaged as error:
        logger.error("checkpoint %s cannot be used: %s", path.name, error)
        damaged[path] = str(error)
        return False


def _listed(damaged: Mapping[Path, str]) -> str:
    return "; ".join(f"{path.name} ({error})" for path, error in damaged.items())


def _checked(
    path: Path | None, state: TrainerState, committed: Committed, config: CheckpointConfig, store_id: str,
    damaged: Mapping[Path, str],
) -> ChosenCheckpoint:  # fmt: skip
    """The choice of this checkpoint. Raises ConfigError if the run may not continue from it."""
    state.check_store(store_id)
    if path == Path(config.resume):
        state = replace(state, resumed_from=config.resume)
    ledger = Ledger(state.ledger)
    if ledger.last_id > committed.last_id:
        raise ConfigError(
            f"checkpoint {path} was trained on prompt {ledger.last_id}, but the newest prompt of this Redis is "
            f"{committed.last_id}: it is older, and would give ids of trained prompts out again; restore a newer copy "
            "of Redis, or set learner.checkpoint.resume to an older checkpoint, or start a new run from these weights "
            "(penstock export)"
        )
    uncovered, newest = ledger.missing(committed.trained), next(iter(damaged), path)
    choice = ChosenCheckpoint(path, state, uncovered, committed, store_id, newest)
    if not choice.uncovered:
        return choice
    newer = f"; newer checkpoints are damaged: {_listed(damaged)}" if damaged else ""
    name = f"checkpoint {path}" if path else "the model folder"
    text = (
        f"{name} is at step {state.step}, but step {committed.step} is committed{newer}; {len(choice.uncovered)} "
        "groups that were trained since would be missing in the weights"
    )
    if path is None:
        raise ConfigError(f"{text}; restore the run's checkpoints, or start a new run")
    if state.step < committed.kept_after:
        raise ConfigError(
            f"{text}; the run can only be rewound to step {committed.kept_after} or later, because older prompts are "
            "no longer kept; start a new run from this checkpoint's weights (penstock export)"
        )
    if not _asks_for(config, choice):
        raise ConfigError(
            f"{text}; use the checkpoint of step {committed.step}, or set learner.checkpoint.resume to {path} and "
            "learner.checkpoint.rewind to true, to rewind and train them again"
        )
    return choice


def _asks_for(config: CheckpointConfig, choice: ChosenCheckpoint) -> bool:
    return config.rewind and choice.checkpoint == Path(config.resume)


async def _rewind_run(queue: GroupConsumer, checkpoints: CheckpointStore, choice: ChosenCheckpoint, term: int) -> None:
    """Undo the commits that the checkpoint does not cover. A file says so first, for those who read checkpoints without
    Redis."""
    planned = RunRewind(choice.path, term, num_orders=0)
    await asyncio.to_thread(record_rewind, checkpoints.folder, term, planned, is_done=False)
    crash_point("before_rewind")
    await queue.rewind(choice.path, choice.state.step, choice.uncovered)
    crash_point("after_rewind")
    logger.warning("rewound to %s: %d groups are made and trained again", choice.path, len(choice.uncovered))


async def _rewind_batches(queue: GroupConsumer, state: TrainerState) -> dict[int, list[int]]:
    """Acknowledge the groups that the checkpoint covers. Returns the batches taken for later steps, by step."""
    ledger = Ledger(state.ledger)
    manifests = await queue.rewind_step(state.step, len(ledger))
    covered = [p for step, ids in manifests.items() if step <= state.step for p in ids if p in ledger]
    if covered:
        await queue.commit(state.step, covered)
    return {step: ids for step, ids in manifests.items() if step > state.step}


async def _count_overdue(queue: GroupConsumer, manifests: Mapping[int, list[int]]) -> int:
    """How many groups cannot be trained within `replay.max_staleness`, because they were admitted for larger steps."""
    replay, stat = queue.config, await queue.stat()
    num_waiting = stat.queued + stat.in_flight - sum(map(len, manifests.values()))
    num_overdue = num_waiting - (replay.max_staleness + 1) * replay.groups_per_step
    if num_overdue <= 0:
        return 0
    outcome = "trained with off-policy correction" if replay.stale_policy == "correct" else "dropped and made again"
    logger.warning(
        "%d groups wait, %d more than replay.groups_per_step %d can train within replay.max_staleness %d; "
        "groups that are too old by then are %s",
        num_waiting, num_overdue, replay.groups_per_step, replay.max_staleness, outcome,
    )  # fmt: skip
    return num_overdue


async def load_checkpoint(path: Path, trained: Mapping[str, RoleGroup]) -> None:
    """Verify a checkpoint, then load it into the trained roles. Raises CheckpointDamaged if a file is damaged; the
    roles are unchanged then. It raises the same if the weights are not finite; they must be loaded again then.
    All ranks share the verification."""
    files = await asyncio.to_thread(read_manifest, path)
    ranks = [(role, rank) for role in trained.values() for rank in range(role.num_ranks)]
    shares = [dict(sorted(files.items())[index :: len(ranks)]) for index in range(len(ranks))]
    found = await gather_all(
        *(role.call_rank(rank, "find_damage", path, share) for (role, rank), share in zip(ranks, shares, strict=True))
    )
    raise_if_damaged([damage for of_rank in found for damage in of_rank])
    await gather_all(*(role.call_all("load_checkpoint", shards_folder(path, name)) for name, role in trained.items()))


async def load_version(
    policy_version: int, trained: Mapping[str, RoleGroup], checkpoints: CheckpointStore, policies: PolicyRegistry
) -> bool:
    """Load a version into the trained roles, because an operator ordered to rewind to it. False, changing nothing, if
    no checkpoint or snapshot of it is intact. A checkpoint holds weights, optimizers and critic. From a snapshot the
    policy takes the weights, in the engines' precision: its optimizer starts from zero, and the critic stays as it is.
    Steps, the learning rate schedule and the ledger continue: trained prompts stay trained."""
    if (checkpoint := await asyncio.to_thread(checkpoints.of_version, policy_version)) is not None:
        try:
            await load_checkpoint(checkpoint, trained)
        except CheckpointDamaged as error:
            logger.error("cannot rewind to version %d from %s: %s", policy_version, checkpoint, error)
        else:
            logger.warning("rewound to version %d, from %s", policy_version, checkpoint)
            return True
    try:
        policy = await policies.get(policy_version)
        await trained["policy"].call_all("load_snapshot", Path(policy.snapshot_path), policy.weights_digest)
    except (NotFound, WeightPushFailed) as error:
        logger.error("cannot rewind to version %d: %s; training continues as before", policy_version, error)
        return False
    logger.warning(
        "rewound to version %d, from %s; the optimizer starts from zero", policy_version, policy.snapshot_path
    )
    return True
