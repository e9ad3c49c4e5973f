"""The state of a term between its checkpoints."""

from __future__ import annotations

from pathlib import Path

from penstock.config.run import ModelConfig, RunConfig
from penstock.config.service import ReplayConfig
from penstock_learner.checkpoints.trainer_state import MAX_REWINDS, Rewind, TrainerState
from penstock_learner.loop.take_over import TakeOver
from penstock_learner.loop.term import begin_term
from support.replay_backends import queue_with


async def test_a_term_and_its_checkpoint_keep_the_newest_rewinds() -> None:
    queue = await queue_with(ReplayConfig(), [])
    config = RunConfig(model=ModelConfig(path=Path("m")))
    stored = [Rewind(version, version + 2, "restart") for version in range(0, 4 * MAX_REWINDS, 2)]
    term = await begin_term(config, queue, TakeOver(await queue.take_term(0), "s", TrainerState(lineage=stored), False))
    assert [each.target for each in term.lineage.rewinds] == [each.target for each in stored[-MAX_REWINDS:]]
    assert {each.why for each in term.lineage.rewinds} == {"restart"}
    term.rewind(900, 910)
    assert len(term.lineage) == MAX_REWINDS and term.lineage.rewinds[-1] == Rewind(900, 910, "order")
    assert term.policy_version == 910
    state = term.trainer_state({})
    assert len(state.lineage) == MAX_REWINDS and state.lineage[-1] == Rewind(900, 910)
