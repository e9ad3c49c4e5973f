"""The state of a term between its checkpoints."""

from __future__ import annotations

from pathlib import Path

from penstock.config.run import ModelConfig, RunConfig
from penstock.config.service import ReplayConfig
from penstock_learner.checkpoints.checkpoint import TrainerState
from penstock_learner.loop.roll_back import RollBack
from penstock_learner.loop.take_over import TakeOver
from penstock_learner.loop.term import MAX_ROLL_BACKS, begin_term
from support.replay_backends import queue_with


async def test_a_term_and_its_checkpoint_keep_the_newest_roll_backs() -> None:
    queue = await queue_with(ReplayConfig(), [])
    config = RunConfig(model=ModelConfig(path=Path("m")))
    stored = [(version, version + 2, True) for version in range(0, 4 * MAX_ROLL_BACKS, 2)]
    term = await begin_term(
        config, queue, TakeOver(await queue.take_term(0), "s", TrainerState(roll_backs=stored), False)
    )
    shared = term.roll_backs
    assert [each.policy_version for each in shared] == [versions[0] for versions in stored[-MAX_ROLL_BACKS:]]
    term.add_roll_back(RollBack(900, 910))
    assert term.roll_backs is shared and len(shared) == MAX_ROLL_BACKS and shared[-1] == RollBack(900, 910)
    state = term.trainer_state({})
    assert len(state.roll_backs) == MAX_ROLL_BACKS and state.roll_backs[-1] == (900, 910, False)
