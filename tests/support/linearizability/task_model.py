"""Tasks and sessions as a sequential model, checked object by object.

A part of the history is one task with the sessions that were leased with it, or one session of its own. Calls of one
name do not depend on those of another name, so checking each part alone finds what checking all would find
(P-compositionality), and the search stays small. A lease of places of several tasks is split: that it is atomic over
all of them is not checked here, nor are the order of leases and the limits of tasks and bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from support.linearizability.checker import Call, Refusal, explain
from support.linearizability.queue_model import LEASE_SLACK_S

SILENT = ("lost", "foreign", "closed", "gone")
"""Outcomes of calls that changed nothing, whatever the state was, except of `close`."""


@dataclass(frozen=True)
class TaskDetails:
    """Arguments and outcome of a call. An outcome of None was lost."""

    owner: str = ""
    session: str = ""
    place: int = -1
    call_id: str = ""
    list_name: str = ""
    """The list of calls that a recorded call refers to."""
    failure: str = ""
    reward: float = 0.0
    group: int = 0
    """The prompt id of the group that `finish` brings."""
    sessions: tuple[str, ...] = ()
    """The sessions of that group."""
    outcome: object = None


@dataclass(frozen=True)
class Session:
    owner: str | None = None
    list_name: str = ""
    num_calls: int = 0
    place: int = -1
    reward: float | None = None
    is_abandoned: bool = False
    answer: int | None = None
    """The group that it has become; 0 for none. None if it has not been answered."""
    expires_s: float = math.inf

    def may_be_used_by(self, owner: str) -> bool:
        return self.owner in (None, owner)


@dataclass(frozen=True)
class Place:
    state: str = "pending"
    attempt: int = 0
    failures: int = 0
    expires_s: float = math.inf
    winner: str = ""


@dataclass(frozen=True)
class Work:
    """A task, if it is stored, and sessions."""

    owner: str | None = None
    state: str = "missing"
    places: tuple[Place, ...] = ()
    sessions: tuple[tuple[str, Session], ...] = ()
    answer: int = 0

    def session(self, name: str) -> Session:
        return dict(self.sessions).get(name, Session())

    def with_session(self, name: str, session: Session) -> Work:
        sessions = dict(self.sessions) | {name: session}
        return replace(self, sessions=tuple(sorted((key, one) for key, one in sessions.items() if one != Session())))

    def with_place(self, index: int, place: Place) -> Work:
        return replace(self, places=(*self.places[:index], place, *self.places[index + 1 :]))

    def count(self, state: str) -> int:
        return sum(place.state == state for place in self.places)

    @property
    def shown(self) -> tuple[object, ...]:
        winners = tuple(place.winner for place in self.places if place.winner)
        return self.state, self.count("rewarded"), self.count("failed"), winners, self.answer


@dataclass(frozen=True)
class TaskModel:
    """One task and its sessions; `name` is empty for a session of its own."""

    name: str
    num_places: int
    lease_s: float
    session_ttl_s: float
    max_failures: int
    initial: Work = field(default_factory=Work)

    def describe(self, state: Work) -> str:
        return f"the state is {state}"

    def is_read(self, call: Call) -> bool:
        is_repeated = call.name == "submit" and call.details.outcome in ("replayed", "taken")
        return call.name == "get" or is_repeated or (call.name != "close" and call.details.outcome in SILENT)

    def passed(self, state: Work, now_s: float) -> list[Work]:
        """A place whose lease has run out is pending again, and a session that has expired is forgotten."""
        leased = [(index, place) for index, place in enumerate(state.places) if place.state == "leased"]
        returned = [
            self._returned(state, index, "lease_expired") for index, place in leased if now_s >= place.expires_s
        ]
        ended = [name for name, session in state.sessions if now_s >= session.expires_s]
        return returned + [state.with_session(name, Session()) for name in ended]

    def step(self, state: Work, call: Call) -> Work | Refusal:
        after, outcome = getattr(self, f"_{call.name}")(state, call.details, call)
        if call.details.outcome not in (None, outcome):
            return Refusal(f"the answer would be {outcome}, not {call.details.outcome}: {state}")
        return after  # type: ignore[no-any-return]

    def _submit(self, state: Work, given: TaskDetails, call: Call) -> tuple[Work, object]:
        if state.owner is not None:
            return state, "replayed" if state.owner == given.owner else "taken"
        return replace(state, owner=given.owner, state="pending", places=(Place(),) * self.num_places), "stored"

    def _lease(self, state: Work, given: TaskDetails, call: Call) -> tuple[Work, object]:
        place = state.places[given.place] if state.places else Place("missing")
        if place.state != "pending" or state.state not in ("pending", "open") or state.owner != given.owner:
            return state, "no lease"
        session = f"{self.name}.{given.place}.{place.attempt + 1}"
        leased = replace(place, state="leased", attempt=place.attempt + 1, expires_s=self._expiry(call))
        after = replace(state.with_place(given.place, leased), state="open")
        return after.with_session(session, Session(owner=state.owner, place=given.place)), session

    def _leased_place(self, state: Work, given: TaskDetails) -> int:
        """The place whose lease the caller's session holds; -1 if it holds none."""
        session = state.session(given.session)
        if not session.may_be_used_by(given.owner) or session.place < 0:
            return -1
        place = state.places[session.place]
        is_held = place.state == "leased" and given.session == f"{self.name}.{session.place}.{place.attempt}"
        return session.place if is_held else -1

    def _renewed(self, state: Work, given: TaskDetails, call: Call) -> Work:
        index = self._leased_place(state, given)
        renewed = replace(state.places[index], expires_s=self._expiry(call)) if index >= 0 else Place()
        return state.with_place(index, renewed) if index >= 0 else state

    def _heartbeat(self, state: Work, given: TaskDetails, call: Call) -> tuple[Work, object]:
        is_held = self._leased_place(state, given) >= 0
        return self._renewed(state, given, call), "held" if is_held else "lost"

    def _give_back(self, state: Work, given: TaskDetails, call: Call) -> tuple[Work, object]:
        index = self._leased_place(state, given)
        if index < 0:
            return state, "lost"
        return self._returned(self._abandoned(state, given.session), index, given.failure), "held"

    def _returned(self, state: Work, index: int, failure: str) -> Work:
        place = state.places[index]
        failures = place.failures + (failure != "")
        is_failed = failure != "" and failures >= self.max_failures
        after = replace(place, state="failed" if is_failed else "pending", failures=failures, expires_s=math.inf)
        return self._completed(state.with_place(index, after))

    def _completed(self, state: Work) -> Work:
        """The task with its end, if every place was rewarded or has failed. Only the winners' sessions are kept."""
        if state.count("rewarded") + state.count("failed") < len(state.places):
            return state
        winners = {place.winner for place in state.places}
        for name, session in state.sessions:
            if session.place >= 0 and name not in winners:
                state = self._abandoned(state, name)
        return replace(state, state="complete" if state.count("rewarded") else "failed")

    def _abandoned(self, state: Work, name: str) -> Work:
        ended = replace(state.session(name), is_abandoned=True, num_calls=0, reward=0.0, answer=0)
        return state.with_session(name, ended)

    # ── sessions ──

    def _open(self, state: Work, given: TaskDetails, call: Call) -> tuple[Work, object]:
        session = state.session(given.session)
        if not session.may_be_used_by(given.owner):
            return state, "foreign"
        after = self._renewed(state, given, call)
        return after, "closed" if session.reward is not None else (session.list_name, session.num_calls)

    def _record(self, state: Work, given: TaskDetails, call: Call) -> tuple[Work, object]:
        session = state.session(given.session)
        if not session.may_be_used_by(given.owner):
            return state, "foreign"
        if session.reward is not None:
            return state, "closed"
        if given.list_name and (session.num_calls == 0 or session.list_name != given.list_name):
            return state, "gone"
        list_name = session.list_name if session.num_calls else given.call_id
        expires_s = math.inf if self.name else call.called_s + self.session_ttl_s - LEASE_SLACK_S
        recorded = replace(
            session, owner=session.owner or given.owner, list_name=list_name, num_calls=session.num_calls + 1,
            expires_s=expires_s,
        )  # fmt: skip
        return state.with_session(given.session, recorded), "recorded"

    def _close(self, state: Work, given: TaskDetails, call: Call) -> tuple[Work, object]:
        session = state.session(given.session)
        if not session.may_be_used_by(given.owner):
            return state, "missing"
        if session.answer is not None:
            return state, ("answered", session.answer)
        if session.reward is not None and session.place >= 0:
            return state, "complete" if state.state == "complete" else ("joined", session.reward)
        if session.reward is not None:
            return state, ("closed", session.reward)
        if session.num_calls == 0:
            return state, "missing"
        rewarded = state.with_session(given.session, replace(session, reward=given.reward, expires_s=math.inf))
        if session.place < 0:
            return rewarded, ("closed", given.reward)
        place = state.places[session.place]
        if state.state != "open" or place.state not in ("pending", "leased"):
            return self._abandoned(state, given.session), ("answered", 0)
        for name, other in state.sessions:
            if other.place == session.place and name != given.session:
                rewarded = self._abandoned(rewarded, name)
        won = replace(place, state="rewarded", expires_s=math.inf, winner=given.session)
        after = self._completed(rewarded.with_place(session.place, won))
        return after, "complete" if after.state == "complete" else ("joined", given.reward)

    def _finish(self, state: Work, given: TaskDetails, call: Call) -> tuple[Work, object]:
        """The first answer counts, for whoever comes later."""
        known = state.session(given.sessions[0]).answer if given.sessions else None
        answer = given.group if known is None else known
        expires_s = math.inf if self.name else call.called_s + self.session_ttl_s - LEASE_SLACK_S
        for name in given.sessions:
            ended = replace(state.session(name), answer=answer, num_calls=0, expires_s=expires_s)
            state = state.with_session(name, ended)
        if state.state == "complete":
            state = replace(state, state="finished", answer=answer)
        return state, answer

    def _get(self, state: Work, given: TaskDetails, call: Call) -> tuple[Work, object]:
        return state, state.shown if state.owner == given.owner else "missing"

    def _expiry(self, call: Call) -> float:
        return call.called_s + self.lease_s - LEASE_SLACK_S


@dataclass
class TaskHistory:
    """Calls by the task or session that they name. Recorders add calls; `problems` checks them."""

    lease_s: float
    session_ttl_s: float
    max_failures: int
    sizes: dict[str, int] = field(default_factory=dict)
    """Number of places of each task; 0 for a session of its own."""
    calls: dict[str, list[Call]] = field(default_factory=dict)
    lost_leases: list[Call] = field(default_factory=list)
    """Leases whose answer was lost: they may have leased any place of their owner."""

    def problems(self) -> list[str]:
        """Explanations of all parts that are not linearizable."""
        problems = []
        for name, calls in self.calls.items():
            size = self.sizes[name]
            model = TaskModel(name if size else "", size, self.lease_s, self.session_ttl_s, self.max_failures)
            lost = [
                replace(call, details=replace(call.details, place=place))
                for call in self.lost_leases
                for place in range(size)
                if call.latest_s >= calls[0].called_s
            ]
            if text := explain([*calls, *lost], model):
                problems.append(f"{name}: {text}")
        return problems
