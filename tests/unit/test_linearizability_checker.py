"""The checker of linearizability: it accepts histories that can be explained, and rejects and explains the others."""

from __future__ import annotations

import math
from typing import Any

import pytest

from support.linearizability.checker import Call
from support.linearizability.queue_model import Details, History, Seen

LEASE_TTL_S = 10.0
LOST = math.inf


class Story:
    """A history of one prompt, (1, 0), told call by call. A call begins at the time of its place, and takes half a
    second unless its end is given."""

    def __init__(self) -> None:
        self.history = History(LEASE_TTL_S, max_attempts=3, sizes={1: 1})

    def tell(
        self, name: str, at_s: float, prompt_id: int | None = 7, attempt: int = 0, state: str = "",
        end_s: float | None = None, **details: Any,
    ) -> Story:  # fmt: skip
        call = Call("client", name, at_s, at_s + 0.5 if end_s is None else end_s, Details((), **details), state)
        self.history.calls.append((call, {(1, 0): Seen(0, prompt_id, attempt, state)}))
        return self

    def trained(self) -> Story:
        """The whole way of a prompt, from its submission at 0 to its commit at 4."""
        self.tell("submit", 0, replayed=False).tell("lease", 1, attempt=1, server="a")
        self.tell("append", 2, attempt=1, state="accepted").tell("take", 3, step=1)
        return self.tell("commit", 4, state="covered", step=1, is_found=True)

    @property
    def problem(self) -> str:
        return "\n".join(self.history.problems())


def test_a_whole_life_is_accepted() -> None:
    story = Story().trained().tell("submit", 5, replayed=True).tell("get", 6, state="trained")
    assert story.problem == ""


def test_an_acknowledged_prompt_that_is_lost_is_rejected() -> None:
    story = Story().tell("submit", 0, replayed=False).tell("get", 1, state="pending").tell("get", 2, state="unknown")
    assert "a read shows pending, attempt 0" in story.problem
    assert "get pending" not in story.problem, "a read that is not needed is not shown"


def test_a_prompt_that_is_trained_twice_is_rejected() -> None:
    for name, details in (("lease", {"attempt": 2, "server": "b"}), ("take", {"step": 2})):
        assert "is trained" in Story().trained().tell(name, 5, **details).problem
    again = Story().trained().tell("commit", 5, state="covered", step=2, is_found=True)
    assert "the commit has found it" in again.problem


def test_a_stale_read_is_rejected() -> None:
    assert "a read shows trained" in Story().trained().tell("get", 5, state="queued", attempt=1).problem
    concurrent = Story().trained().tell("get", 4.2, state="queued", attempt=1)
    assert concurrent.problem == "", "the commit may have been executed after the read"


def test_a_repetition_that_stored_twice_is_rejected() -> None:
    again = Story().tell("submit", 0, replayed=False).tell("submit", 1, prompt_id=8, replayed=False)
    assert "stored again under the same key" in again.problem
    other = Story().tell("submit", 0, replayed=False).tell("submit", 1, prompt_id=8, replayed=True)
    assert "the repetition shows 8, and it is stored as 7" in other.problem
    never = Story().tell("submit", 0, replayed=True)
    assert "nothing is stored" in never.problem


def test_a_lease_that_is_given_twice_is_rejected() -> None:
    twice = Story().tell("submit", 0, replayed=False).tell("lease", 1, attempt=1, server="a")
    twice.tell("lease", 3, attempt=2, server="b")
    assert "leased by a until 10.950 s" in twice.problem and "only a pending prompt is leased" in twice.problem
    expired = Story().tell("submit", 0, replayed=False).tell("lease", 1, attempt=1, server="a")
    expired.tell("lease", 12, attempt=2, server="b")
    assert expired.problem == ""
    renewed = Story().tell("submit", 0, replayed=False).tell("lease", 1, attempt=1, server="a")
    renewed.tell("heartbeat", 8, attempt=1, state="held", server="a").tell("lease", 12, attempt=2, server="b")
    assert "until 17.950 s" in renewed.problem


def test_a_prompt_of_a_submission_that_was_stored_in_part_is_rejected() -> None:
    history = History(LEASE_TTL_S, max_attempts=3, sizes={1: 2})
    submitted = Call("client", "submit", 0, LOST, Details((), replayed=None))
    history.calls.append((submitted, {(1, 0): Seen(0), (1, 1): Seen(1)}))
    read = Call("client", "get", 1, 2, Details(()))
    history.calls.append((read, {(1, 0): Seen(0, 7, state="pending"), (1, 1): Seen(1, 8, state="unknown")}))
    assert "prompt 8 is pending (attempt 0): a read shows pending" in "\n".join(history.problems())


def test_one_id_for_two_prompts_is_rejected() -> None:
    story = Story().tell("submit", 0, replayed=False)
    story.history.sizes[2] = 1
    other = Call("client", "submit", 1, 2, Details((), replayed=False))
    story.history.calls.append((other, {(2, 0): Seen(0, 7)}))
    assert "one id, 7, stands for two prompts" in story.problem


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_call_whose_answer_was_lost_may_have_been_executed_or_not(is_stored: bool) -> None:
    story = Story().tell("submit", 0, prompt_id=None, end_s=LOST, replayed=None)
    story.tell("submit", 1, replayed=is_stored).tell("get", 2, state="pending")
    assert story.problem == ""


def test_a_lost_lease_explains_an_attempt_but_only_after_its_call() -> None:
    def story(lost_at_s: float) -> Story:
        story = Story().tell("submit", 0, replayed=False).tell("lease", 20, attempt=2, server="b")
        lost = Call("a", "lease", lost_at_s, LOST, Details((), server="a"))
        story.history.lost_anywhere.append(lost)
        return story

    assert story(1).problem == ""
    assert "a lease is attempt 1 of prompt 7" in story(30).problem
    assert "only a pending prompt is leased" in story(15).problem, "its lease would not have run out yet"


def test_a_lost_call_to_a_killed_process_is_executed_before_a_later_read_or_never() -> None:
    def story(latest_s: float) -> Story:
        story = Story().tell("submit", 0, replayed=False).tell("get", 3, end_s=5, state="pending")
        lost = Call("client", "cancel", 2, LOST, Details(()), latest_s=latest_s)
        story.history.calls.append((lost, {(1, 0): Seen(0, 7)}))
        return story.tell("get", 6, state="cancelled")

    assert story(latest_s=4).problem == ""
    assert "a read shows pending" in story(latest_s=2.5).problem, "the first read comes after it"


def test_a_read_does_not_use_up_the_time_of_a_lost_call() -> None:
    """The search executes reads first, but not past the last moment of a lost call that explains what follows."""
    story = Story().tell("submit", 0, replayed=False).tell("lease", 1, attempt=1, server="a")
    lost = Call("a", "give_back", 2, LOST, Details((), server="a"), latest_s=2.5)
    story.history.calls.append((lost, {(1, 0): Seen(0, 7, attempt=1)}))
    story.history.sizes[1] = 2
    story.history.calls[0][1][1, 1] = Seen(1, 8)
    read = Call("client", "get", 3, 3.5, Details(()))
    story.history.calls.append((read, {(1, 1): Seen(1, 8, state="pending")}))
    assert story.tell("lease", 4, attempt=2, server="b").problem == ""


def test_a_lost_take_delivers_again_and_a_commit_frees_what_it_does_not_cover() -> None:
    def ready() -> Story:
        story = Story().tell("submit", 0, replayed=False).tell("lease", 1, attempt=1, server="a")
        story.tell("append", 2, attempt=1, state="accepted")
        story.history.lost_anywhere.append(Call("learner", "take", 3, LOST, Details((), step=1)))
        return story

    assert ready().tell("take", 4, step=1).problem == ""
    assert "only a group that is ready is taken" in ready().tell("take", 4, step=1).tell("take", 5, step=2).problem
    freed = ready().tell("cancel", 3.6, state="queued", attempt=1)
    freed.history.calls.append((Call("learner", "commit", 4, 4.5, Details((), step=1)), {}))
    assert freed.tell("take", 5, step=2).problem == "", "the commit of step 1 has made it ready again"
    missed = ready().tell("cancel", 3.6, state="queued", attempt=1)
    assert "only a group that is ready is taken" in missed.tell("take", 5, step=2).problem


def test_a_fenced_learner_that_was_answered_is_rejected() -> None:
    history = History(LEASE_TTL_S, max_attempts=3)
    history.terms += [Call("one", "take_term", 0, 1, 1), Call("two", "take_term", 2, 3, 2)]
    history.terms.append(Call("one", "take", 2.5, 3.5, (1, False)))
    assert history.problems() == [], "it may have been executed before the second learner took its term"
    history.terms.append(Call("one", "commit", 4, 5, (1, False)))
    assert "the term is 2" in "\n".join(history.problems())


def test_the_explanation_is_the_shortest_part_that_fails() -> None:
    story = Story().trained()
    for at_s in range(5, 30):
        story.tell("get", at_s, state="trained").tell("submit", at_s + 0.1, replayed=True)
    story.tell("get", 30, state="pending").tell("get", 31, state="trained")
    text = story.problem
    assert text.startswith("submission 1: no order of these calls explains their answers:")
    assert text.count(" get ") == text.count(" submit ") == 1, text
    assert "executed in the order 1 2 3 4 5, prompt 7 is trained" in text
    assert "  6. prompt 7 is trained (attempt 1): a read shows trained, attempt 0" in text


def test_the_lease_of_an_earlier_id_is_lost() -> None:
    story = Story().tell("submit", 0, replayed=False).tell("lease", 1, attempt=1, server="a")
    story.tell("append", 2, attempt=1, state="accepted").tell("dead_letter", 3).tell("requeue", 4, attempt=9)
    story.tell("lease", 5, prompt_id=9, attempt=1, server="a")
    story.tell("heartbeat", 6, attempt=1, state="lost", server="a")
    assert story.problem == ""
    story.tell("heartbeat", 7, prompt_id=9, attempt=1, state="lost", server="a")
    assert "the lease cannot be lost" in story.problem
