"""A checker of linearizability: Wing and Gong's search with Lowe's memoization, as in Porcupine.

A history is linearizable if every call can be given one moment between its call and its return, so that the answers are
those of a sequential model that executes the calls in the order of these moments. A call whose answer was lost has no
return: it may have taken effect at any moment after its call, or never.

The search is exponential in the number of concurrent calls, so a history is checked in parts that do not depend on each
other (P-compositionality). The caller splits it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
MAX_CONFIGURATIONS = 300_000
"""The search ends with an error after so many. A history that was not decided is not called linearizable."""


@dataclass(frozen=True)
class Call:
    """One call of one client."""

    client: str
    name: str
    called_s: float
    returned_s: float
    """`math.inf` if the answer was lost."""
    details: Any = None
    """Arguments and answer. Only the model reads them."""
    text: str = ""
    """The arguments and the answer for people."""
    latest_s: float = math.inf
    """A call whose answer was lost has taken effect by this moment or never will, because its process was killed."""

    @property
    def is_lost(self) -> bool:
        return math.isinf(self.returned_s)


@dataclass(frozen=True)
class Refusal:
    """Why the model cannot give a call's answer in a state."""

    reason: str


class Model(Protocol[S]):
    """A sequential specification. States are compared and hashed."""

    @property
    def initial(self) -> S: ...

    def step(self, state: S, call: Call) -> S | Refusal:
        """The state after the call, if it can be executed in this state with this answer."""

    def is_read(self, call: Call) -> bool:
        """Whether the call's answer shows that it changed nothing, whatever the state was."""

    def passed(self, state: S, now_s: float) -> Sequence[S]:
        """Other states that time alone may have led to by `now_s`, each by one event, such as a lease that ran out."""

    def describe(self, state: S) -> str: ...


@dataclass(frozen=True)
class Stuck(Generic[S]):
    """The longest order that the search has found, and why no call can follow."""

    order: tuple[Call, ...]
    state: S
    refusals: tuple[tuple[Call, str], ...]


class Undecided(Exception):
    """The search is too large. Split the history into smaller parts."""


def search(calls: Sequence[Call], model: Model[S]) -> Stuck[S] | None:
    """None if the history is linearizable."""
    answered = sorted((call for call in calls if not call.is_lost), key=lambda call: call.called_s)
    calls = [*answered, *(call for call in calls if call.is_lost)]
    must = (1 << len(answered)) - 1
    stack: list[tuple[int, S, tuple[int, ...], float]] = [(0, model.initial, (), -math.inf)]
    seen = {(0, model.initial)}
    deepest: Stuck[S] | None = None
    while stack:
        done, state, order, reached_s = stack.pop()
        if done & must == must:
            return None
        if len(seen) > MAX_CONFIGURATIONS:
            raise Undecided(f"{len(calls)} calls: no answer after {MAX_CONFIGURATIONS} configurations")
        now_s, candidates = _candidates(answered, done, must)
        lost = [i for i in range(len(answered), len(calls)) if not done >> i & 1 and calls[i].called_s <= now_s]
        lost = [i for i in lost if reached_s <= calls[i].latest_s]
        deadline_s = min((calls[i].latest_s for i in lost), default=math.inf)
        following: list[tuple[int, S, tuple[int, ...], float]] = []
        refusals = []
        for i in candidates + lost:
            call = calls[i]
            after = model.step(state, call)
            if isinstance(after, Refusal):
                refusals.append((call, after.reason))
                continue
            following_call = (done | 1 << i, after, (*order, i), max(reached_s, call.called_s))
            if model.is_read(call) and following_call[3] <= deadline_s:  # it changes nothing anywhere: try no other
                following = [following_call]
                break
            if not call.is_lost or after != state:
                following.append(following_call)
        else:
            following += [(done, later, order, reached_s) for later in model.passed(state, now_s)]
        if deepest is None or len(order) > len(deepest.order):
            deepest = Stuck(tuple(calls[i] for i in order), state, tuple(refusals))
        for configuration in reversed(following):
            if configuration[:2] not in seen:
                seen.add(configuration[:2])
                stack.append(configuration)
    return deepest


def _candidates(answered: Sequence[Call], done: int, must: int) -> tuple[float, list[int]]:
    """The next call takes effect before the first of the others returns, so it must have been called by then. Returns
    this moment and those calls, the first to return first. `answered` is sorted by the time of the call."""
    left = must & ~done
    first = (left & -left).bit_length() - 1
    now_s, found = math.inf, []
    for i in range(first, len(answered)):
        if answered[i].called_s > now_s:
            break
        if not done >> i & 1:
            now_s = min(now_s, answered[i].returned_s)
            found.append(i)
    found = [i for i in found if answered[i].called_s <= now_s]
    return now_s, sorted(found, key=lambda i: answered[i].returned_s)


def explain(calls: Sequence[Call], model: Model[S]) -> str | None:
    """None if the history is linearizable. Otherwise why not: the shortest part of it that is not linearizable either,
    in the order of the calls, and how far the search came."""
    if search(calls, model) is None:
        return None
    shortest = _shortest_prefix(calls, model)
    for call in shortest:  # a read only restricts the others, so it can be left out if the rest still fails
        rest = [other for other in shortest if other is not call]
        if model.is_read(call) and search(rest, model) is not None:
            shortest = rest
    stuck = search(shortest, model)
    assert stuck is not None
    idle = _idle(stuck, model)
    shown = [call for call in sorted(shortest, key=lambda call: call.called_s) if call not in idle]
    numbers = {call: number for number, call in enumerate(shown, start=1)}
    lines = ["no order of these calls explains their answers:"]
    lines += [f"  {number:3}. {line(call)}" for call, number in numbers.items()]
    order = " ".join(str(numbers[call]) for call in stuck.order if call not in idle)
    lines.append(f"executed in the order {order or '(none)'}, {model.describe(stuck.state)}; none of these can follow:")
    lines += [f"  {numbers[call]:3}. {reason}" for call, reason in stuck.refusals]
    return "\n".join(lines)


def line(call: Call) -> str:
    """A call for people. The end of a call is open if its answer was lost, or had not arrived yet."""
    end = "   open" if call.is_lost else f"{call.returned_s:7.3f}"
    return f"{call.called_s:7.3f} to {end} s  {call.client:12} {call.name} {call.text}"


def _idle(stuck: Stuck[S], model: Model[S]) -> set[Call]:
    """Calls of the longest order that could have changed something, and did not. They explain nothing."""
    idle, state = set(), model.initial
    for call in stuck.order:
        states = [state]
        for before in states:  # time may have passed in between
            state, after = before, model.step(before, call)
            if not isinstance(after, Refusal):
                break
            states += [later for later in model.passed(before, math.inf) if later not in states]
        else:
            return idle
        if after == state and not model.is_read(call):
            idle.add(call)
        state = after
    return idle


def _shortest_prefix(calls: Sequence[Call], model: Model[S]) -> list[Call]:
    """What was known at the first moment at which the history was not linearizable any more. Later prefixes contain
    earlier ones, so it is found by bisection."""
    returns = sorted(call.returned_s for call in calls if not call.is_lost)
    low, high = 0, len(returns) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if search(_until(calls, returns[middle]), model) else (middle + 1, high)
    return _until(calls, returns[low])


def _until(calls: Sequence[Call], end_s: float) -> list[Call]:
    """The calls up to a moment. Those that had not returned by then count as lost."""
    return [
        call if call.returned_s <= end_s else replace(call, returned_s=math.inf)
        for call in calls
        if call.called_s <= end_s
    ]
