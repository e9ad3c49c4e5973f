"""The state of a term between its checkpoints."""

from __future__ import annotations

from penstock_learner.checkpoints.trainer_state import MAX_REWINDS, Lineage, Rewind
from penstock_learner.loop.term import Term


def test_a_term_and_its_checkpoint_keep_the_newest_rewinds() -> None:
    stored = [Rewind(version, version + 2, "restart") for version in range(0, 4 * MAX_REWINDS, 2)]
    term = Term(lineage=Lineage(stored))
    assert [each.from_version for each in term.lineage.rewinds] == [each.from_version for each in stored[-MAX_REWINDS:]]
    assert {each.why for each in term.lineage.rewinds} == {"restart"}
    term.rewind(900, 910)
    assert len(term.lineage) == MAX_REWINDS and term.lineage.rewinds[-1] == Rewind(900, 910, "order")
    assert term.policy_version == 910
    state = term.trainer_state({})
    assert len(state.lineage) == MAX_REWINDS and state.lineage[-1] == Rewind(900, 910)
