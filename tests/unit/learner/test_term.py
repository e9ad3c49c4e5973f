"""The state of a term between its checkpoints."""

from __future__ import annotations

from penstock_learner.term import MAX_REWINDS, Rewind, Term


def test_a_term_and_its_checkpoint_keep_the_newest_rewinds() -> None:
    stored = [Rewind(version, version + 2, "restart") for version in range(0, 4 * MAX_REWINDS, 2)]
    term = Term(lineage=tuple(stored))
    term.rewind(900, 910)
    assert term.lineage == (*stored[1 - MAX_REWINDS :], Rewind(900, 910, "order"))
    assert term.policy_version == 910
    assert term.trainer_state({}).lineage == term.lineage
