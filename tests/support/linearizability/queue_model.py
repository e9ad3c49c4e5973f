"""The replay queue as a sequential model, in parts that a checker can search: one for each submission, and the term.

A part holds the prompts of one submission, so it shows that a submission is stored whole and once. Calls on prompts of
several submissions are split: that they are atomic over all of them is not checked here. Neither is the order of
leases, nor admission: test_replay_properties.py compares both with the memory backend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from support.linearizability.checker import Call, Refusal, explain, line

LEASE_SLACK_S = 0.05
"""Redis rounds times to milliseconds, and its clock is not the one of the clients."""
Name = tuple[int, int]
"""The number of a submission, and the place of the prompt in it: how clients name a prompt, whatever id it has."""


@dataclass(frozen=True)
class Seen:
    """What a call says of one prompt: arguments and answer. None is what is not known, since the answer was lost."""

    index: int
    prompt_id: int | None = None
    attempt: int = 0
    state: str = ""
    """The state that the call returned; of an append its outcome, of a heartbeat `held` or `lost`."""


@dataclass(frozen=True)
class Details:
    """A call on prompts of one submission."""

    seen: tuple[Seen, ...]
    server: str = ""
    failure: str = ""
    step: int = 0
    replayed: bool | None = None
    is_found: bool | None = None
    """Whether a commit found all its prompts (True) or none of them (False)."""


@dataclass(frozen=True)
class Prompt:
    """A stored prompt."""

    ids: tuple[int | None, ...]
    """The id of the submission, then the id of each requeue. None if no answer has shown it yet."""
    place: str = "pending"
    attempt: int = 0
    failures: int = 0
    owner: tuple[str, int] = ("", 0)
    expires_s: float = math.inf
    """The earliest moment at which the lease may have run out."""
    step: int = 0
    is_known: bool = True
    """Whether the learner knows that the group was delivered."""

    @property
    def shown(self) -> tuple[str, int]:
        """State and attempt as reads show them."""
        state = {"ready": "queued", "delivered": "queued"}.get(self.place, self.place)
        return state, 0 if state in ("trained", "dead_lettered", "cancelled") else self.attempt

    def __str__(self) -> str:
        ids = "/".join("?" if prompt_id is None else str(prompt_id) for prompt_id in self.ids)
        owner = f" by {self.owner[0]} until {self.expires_s:.3f} s" if self.place == "leased" else ""
        return f"prompt {ids} is {self.place}{owner} (attempt {self.attempt})"


Prompts = tuple[Prompt | None, ...]
READS = ("get", "list", "list_dead", "fetch")
IN_QUEUE = ("ready", "delivered")
MANIFEST_CALLS = ("commit", "rewind_step")


@dataclass(frozen=True)
class SubmissionModel:
    """The prompts of one submission."""

    num_prompts: int
    lease_ttl_s: float
    max_attempts: int

    @property
    def initial(self) -> Prompts:
        return (None,) * self.num_prompts

    def describe(self, state: Prompts) -> str:
        return "; ".join(str(prompt or "prompt is not stored") for prompt in state)

    def is_read(self, call: Call) -> bool:
        if call.name == "submit":
            return call.details.replayed is True
        if call.name in ("append", "cancel"):
            return all(seen.state not in ("", "accepted", "cancelled") for seen in call.details.seen)
        return call.name in READS

    def passed(self, state: Prompts, now_s: float) -> list[Prompts]:
        """Leases that have run out are taken back by the next lease of anyone."""
        return [
            (*state[:index], self._given_back(prompt, "lease_expired"), *state[index + 1 :])
            for index, prompt in enumerate(state)
            if prompt and prompt.place == "leased" and now_s >= prompt.expires_s
        ]

    def step(self, state: Prompts, call: Call) -> Prompts | Refusal:
        if call.name == "submit":
            return self._submit(state, call)
        prompts, details = list(state), call.details
        for seen in details.seen:
            prompt = prompts[seen.index]
            if prompt is None and call.name in MANIFEST_CALLS and seen.prompt_id is None:
                continue
            if prompt is None:
                return Refusal(f"prompt {seen.prompt_id or '?'} is not stored")
            if seen.prompt_id is not None and prompt.ids[-1] is None and seen.prompt_id not in prompt.ids:
                prompt = replace(prompt, ids=(*prompt.ids[:-1], seen.prompt_id))
            after = getattr(self, f"_{call.name}")(prompt, seen, call)
            if isinstance(after, str):
                return Refusal(f"{prompt}: {after}")
            prompts[seen.index] = after
        return tuple(prompts)

    def _submit(self, state: Prompts, call: Call) -> Prompts | Refusal:
        details = call.details
        ids = {seen.index: seen.prompt_id for seen in details.seen}
        if state == self.initial:
            if details.replayed:
                return Refusal("the answer is a repetition, but nothing is stored")
            return tuple(Prompt((ids.get(index),)) for index in range(self.num_prompts))
        if details.replayed is False:
            return Refusal(f"stored again under the same key: {self.describe(state)}")
        bound = []
        for index, prompt in enumerate(state):
            assert prompt is not None
            first, *others = prompt.ids
            if ids.get(index) is not None and first not in (None, ids[index]):
                return Refusal(f"the repetition shows {ids[index]}, and it is stored as {first}")
            bound.append(replace(prompt, ids=(first if first is not None else ids.get(index), *others)))
        return tuple(bound)

    # ── rollout servers ──

    def _lease(self, prompt: Prompt, seen: Seen, call: Call) -> Prompt | str:
        attempt = prompt.attempt + 1
        if prompt.place != "pending":
            return "only a pending prompt is leased"
        if seen.prompt_id is not None and (seen.prompt_id, seen.attempt) != (prompt.ids[-1], attempt):
            return f"a lease is attempt {attempt} of prompt {prompt.ids[-1]}"
        owner = (call.details.server, attempt)
        return replace(prompt, place="leased", attempt=attempt, owner=owner, expires_s=self._expiry(call))

    def _heartbeat(self, prompt: Prompt, seen: Seen, call: Call) -> Prompt | str:
        is_held = self._is_held(prompt, seen, call)
        if seen.state and (seen.state == "held") != is_held:
            return f"the lease cannot be {seen.state}"
        return replace(prompt, expires_s=self._expiry(call)) if is_held else prompt

    def _give_back(self, prompt: Prompt, seen: Seen, call: Call) -> Prompt | str:
        return self._given_back(prompt, call.details.failure) if self._is_held(prompt, seen, call) else prompt

    def _append(self, prompt: Prompt, seen: Seen, call: Call) -> Prompt | str:
        if seen.prompt_id != prompt.ids[-1]:
            outcome = "unknown"
        elif prompt.place in ("pending", "leased"):
            outcome = "accepted"
        else:
            outcome = "duplicate" if prompt.place in (*IN_QUEUE, "trained") else "unknown"
        if seen.state not in ("", outcome):
            return f"the answer would be {outcome}"
        return _without_lease(prompt, "ready") if outcome == "accepted" else prompt

    # ── the learner ──

    def _take(self, prompt: Prompt, seen: Seen, call: Call) -> Prompt | str:
        """A lost answer leaves a group delivered that the learner does not know. The next take returns it."""
        step, is_answered = call.details.step, seen.prompt_id is not None
        is_again = is_answered and prompt.place == "delivered" and not prompt.is_known and prompt.step == step
        if prompt.place != "ready" and not is_again:
            return "only a group that is ready is taken"
        if is_answered and seen.prompt_id != prompt.ids[-1]:
            return f"its id is {prompt.ids[-1]}"
        return replace(prompt, place="delivered", step=step, is_known=is_answered)

    def _fetch(self, prompt: Prompt, seen: Seen, call: Call) -> Prompt | str:
        return prompt if prompt.place in IN_QUEUE else "only a queued group can be read"

    def _commit(self, prompt: Prompt, seen: Seen, call: Call) -> Prompt | str:
        """`state` is `covered`, or `closed` for a prompt that the commit does not name: it leaves a closed manifest."""
        if seen.state == "closed":
            is_freed = prompt.place == "delivered" and prompt.step <= call.details.step
            return replace(prompt, place="ready", is_known=True) if is_freed else prompt
        is_found = prompt.place in ("pending", "leased", *IN_QUEUE)
        if call.details.is_found not in (None, is_found):
            return f"the commit has {'' if call.details.is_found else 'not '}found it"
        return _without_lease(prompt, "trained")

    def _rewind_step(self, prompt: Prompt, seen: Seen, call: Call) -> Prompt | str:
        """`state` is `listed` if the manifests hold the prompt."""
        if (prompt.place == "delivered") != (seen.state == "listed"):
            return f"the manifests have {'' if seen.state else 'not '}listed it"
        return replace(prompt, is_known=True) if seen.state else prompt

    def _expire(self, prompt: Prompt, seen: Seen, call: Call) -> Prompt | str:
        if prompt.place not in IN_QUEUE:
            return prompt
        return replace(prompt, place="pending", attempt=prompt.attempt + 1)

    def _dead_letter(self, prompt: Prompt, seen: Seen, call: Call) -> Prompt | str:
        return replace(prompt, place="dead_lettered") if prompt.place in IN_QUEUE else prompt

    # ── clients of the gateway ──

    def _get(self, prompt: Prompt, seen: Seen, call: Call) -> Prompt | str:
        shown = ("dead_lettered", 0) if seen.prompt_id in prompt.ids[:-1] else prompt.shown
        return prompt if (seen.state, seen.attempt) == shown else f"a read shows {shown[0]}, attempt {shown[1]}"

    _list = _get

    def _cancel(self, prompt: Prompt, seen: Seen, call: Call) -> Prompt | str:
        if seen.prompt_id in prompt.ids[:-1] or prompt.place in ("delivered", "trained", "dead_lettered", "cancelled"):
            return self._get(prompt, seen, call) if seen.state else prompt
        if seen.state and (seen.state, seen.attempt) != ("cancelled", prompt.attempt):
            return f"it would be cancelled, at attempt {prompt.attempt}"
        return _without_lease(prompt, "cancelled")

    def _list_dead(self, prompt: Prompt, seen: Seen, call: Call) -> Prompt | str:
        is_dead = prompt.place == "dead_lettered" and seen.prompt_id == prompt.ids[-1]
        return prompt if is_dead else "it is not a dead letter"

    def _requeue(self, prompt: Prompt, seen: Seen, call: Call) -> Prompt | str:
        """`attempt` is the new id; 0 if there was no such letter, -1 if the answer was lost."""
        is_dead = prompt.place == "dead_lettered" and seen.prompt_id == prompt.ids[-1]
        if seen.attempt >= 0 and is_dead != bool(seen.attempt):
            return "the letter is there" if is_dead else "there is no such letter"
        return Prompt((*prompt.ids, seen.attempt if seen.attempt > 0 else None)) if is_dead else prompt

    # ── leases ──

    def _expiry(self, call: Call) -> float:
        return call.called_s + self.lease_ttl_s - LEASE_SLACK_S

    def _is_held(self, prompt: Prompt, seen: Seen, call: Call) -> bool:
        """An earlier id of a prompt that was requeued holds nothing."""
        is_owner = prompt.owner == (call.details.server, seen.attempt)
        return prompt.place == "leased" and seen.prompt_id == prompt.ids[-1] and is_owner

    def _given_back(self, prompt: Prompt, failure: str) -> Prompt:
        failures = prompt.failures + (failure != "")
        place = "dead_lettered" if failure and failures >= self.max_attempts else "pending"
        return replace(_without_lease(prompt, place), failures=failures)


def _without_lease(prompt: Prompt, place: str) -> Prompt:
    return replace(prompt, place=place, owner=("", 0), expires_s=math.inf)


@dataclass(frozen=True)
class TermModel:
    """The learner's term. `details` is the answer of take_term, or for any other call its term and whether it was
    fenced."""

    initial: int = 0

    def describe(self, state: int) -> str:
        return f"the term is {state}"

    def is_read(self, call: Call) -> bool:
        return call.name != "take_term"

    def passed(self, state: int, now_s: float) -> tuple[()]:
        return ()

    def step(self, state: int, call: Call) -> int | Refusal:
        if call.name == "take_term":
            is_next = call.details in (None, state + 1)
            return state + 1 if is_next else Refusal(f"the next term is {state + 1}")
        term, is_fenced = call.details
        is_right = state > term if is_fenced else state == term
        return state if is_right else Refusal(f"the term is {state}")


@dataclass
class History:
    """All calls of a run of clients. Recorders add calls; `problems` checks them."""

    lease_ttl_s: float
    max_attempts: int
    sizes: dict[int, int] = field(default_factory=dict)
    """Number of prompts of each submission."""
    calls: list[tuple[Call, dict[Name, Seen]]] = field(default_factory=list)
    """Every call that says something of prompts, and what it says of each."""
    lost_anywhere: list[Call] = field(default_factory=list)
    """Leases and takes whose answer was lost: they may have moved any prompt."""
    terms: list[Call] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Explanations of all parts that are not linearizable, and of ids that stand for several prompts."""
        problems = self._reused_ids()
        for number, part in self.parts().items():
            size = self.sizes[number]
            if text := self._explain(part, size):
                alone = (self._explain(_of_prompt(part, index), 1) for index in range(size))
                problems.append(f"submission {number}: {next(filter(None, alone), text)}")
        if text := explain(self.terms, TermModel()):
            problems.append(f"terms: {text}")
        return problems

    def _explain(self, part: list[Call], size: int) -> str | None:
        return explain(part, SubmissionModel(size, self.lease_ttl_s, self.max_attempts))

    def parts(self) -> dict[int, list[Call]]:
        """The calls on the prompts of each submission."""
        named: dict[int, list[tuple[Call, dict[int, Seen]]]] = {number: [] for number in self.sizes}
        for call, of_call in self.calls:
            by_number: dict[int, dict[int, Seen]] = {}
            for (number, index), seen in of_call.items():
                by_number.setdefault(number, {})[index] = seen
            for number, own in by_number.items():
                named[number].append((call, own))
        return {number: self._part(self.sizes[number], own) for number, own in named.items()}

    def _part(self, size: int, named: list[tuple[Call, dict[int, Seen]]]) -> list[Call]:
        """The calls that name the prompts of a submission, and others that may have changed them: leases and takes
        whose answer was lost, and commits and rewinds, which change the manifests that the prompts may be in."""
        started_s = min((call.called_s for call, _ in named if call.name == "submit"), default=math.inf)
        lost = [call for call in self.lost_anywhere if call.latest_s >= started_s]
        takes = [call for call, _ in named if call.name == "take"] + [call for call in lost if call.name == "take"]
        windows = [self._manifest_window(take) for take in takes]
        own_of = {id(call): own for call, own in named}
        calls = [_narrowed(call, Seen(index)) for call in lost for index in range(size)]
        calls += [_narrowed(call, *own.values()) for call, own in named if call.name not in MANIFEST_CALLS]
        for call, _ in self._manifest_calls if takes else []:
            own, state = own_of.get(id(call), {}), "closed" if call.name == "commit" else ""
            is_near = any(first_s <= call.returned_s and call.called_s <= last_s for first_s, last_s in windows)
            if own or (is_near and call.returned_s >= started_s):
                others = [Seen(index, state=state) for index in range(size) if index not in own]
                calls.append(_narrowed(call, *own.values(), *others))
        return calls

    @cached_property
    def _manifest_calls(self) -> list[tuple[Call, dict[Name, Seen]]]:
        return [recorded for recorded in self.calls if recorded[0].name in MANIFEST_CALLS]

    def _manifest_window(self, take: Call) -> tuple[float, float]:
        """When the groups of a take may be in its manifest: until a commit of its step, or of a later one, returns."""
        taken_s = take.latest_s if take.is_lost else take.returned_s
        closing = (
            call.returned_s
            for call, _ in self._manifest_calls
            if call.name == "commit" and call.details.step >= take.details.step and call.called_s >= taken_s
        )
        return take.called_s, min(closing, default=math.inf)

    def _reused_ids(self) -> list[str]:
        names: dict[int, tuple[Name, Call]] = {}
        problems = []
        for call, named in self.calls:
            for name, seen in named.items():
                shown = seen.attempt if call.name == "requeue" else seen.prompt_id
                if not shown or shown < 0:
                    continue
                known, first = names.setdefault(shown, (name, call))
                if known != name:
                    problems.append(f"one id, {shown}, stands for two prompts:\n  {line(first)}\n  {line(call)}")
        return problems


def _narrowed(call: Call, *seen: Seen) -> Call:
    return replace(call, details=replace(call.details, seen=seen))


def _of_prompt(part: list[Call], index: int) -> list[Call]:
    """The calls on one prompt of a part, as those of a submission of this prompt alone."""
    own = [(call, [replace(seen, index=0) for seen in call.details.seen if seen.index == index]) for call in part]
    return [_narrowed(call, *seen) for call, seen in own if seen]
