"""The state of a term between its checkpoints."""

from __future__ import annotations

from penstock_learner.term import MAX_REWINDS, Ledger, Rewind, Term


def test_a_term_and_its_checkpoint_keep_the_newest_rewinds() -> None:
    stored = [Rewind(version, version + 2, "restart") for version in range(0, 4 * MAX_REWINDS, 2)]
    term = Term(lineage=tuple(stored))
    term.rewind(900, 910)
    assert term.lineage == (*stored[1 - MAX_REWINDS :], Rewind(900, 910, "order"))
    assert term.policy_version == 910
    assert term.trainer_state({}).lineage == term.lineage


def test_a_ledger_finds_what_a_bitmap_lacks() -> None:
    bitmap = bytes([0b01101000])  # prompts 1, 2 and 4
    assert Ledger([(1, 2), (4, 4)]).absent_from(bitmap) == []
    assert Ledger([(1, 5), (20, 21)]).absent_from(bitmap) == [3, 5, 20, 21]
    assert Ledger([(7, 8)]).absent_from(b"") == [7, 8]
