"""The calls of a session as a tree.

A call continues an earlier one if its prompt begins with that call's prompt and answer, id by id. A harness that sends
its whole history back grows one path. If it changes the history (edits, truncates or summarises it), asks twice, or
talks about something else, another path begins:

    call 0: prompt p0, answer a0
    ├─ call 1: p0 a0 then a question, answer a1         path 0 1
    ├─ call 2: p0 a0 then another question, answer a2   path 0 2
    call 3: an edited history, answer a3                path 3

The tree is built from the ids alone, which the engine reported. How the gateway found the ids of a history plays no
part, so a wrong guess can cost a shared prefix, and never a token that was not sampled.

The tree holds each call's difference to another call, so its size grows with the new tokens, not with the prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.codec import FINISH_FROM_PROTO, sampling_from_proto
from penstock.trajectory import FinishReason, Sampling, VersionSegment
from penstock.v1 import sessions_pb2

Ids = NDArray[np.int32]
MAX_COMPARED = 64
"""How many of the newest calls are searched for ids that a new prompt shares with them."""


@dataclass(frozen=True)
class Call:
    """One recorded call. Its prompt is the first `num_shared` ids of the call `base`, then `extra`."""

    call_id: str
    base: int
    num_shared: int
    extra: Ids
    token_ids: Ids
    log_probs: NDArray[np.float32]
    segments: tuple[VersionSegment, ...]
    """Indices count from the first sampled token."""
    sampling: Sampling
    finish_reason: FinishReason
    server_id: str
    finished_at_ms: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_shared + len(self.extra)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the answer."""
        return self.num_prompt_tokens + len(self.token_ids)

    @classmethod
    def of(cls, stored: sessions_pb2.SessionCall) -> Call:
        return cls(
            call_id=stored.call_id, base=stored.base, num_shared=stored.num_shared,
            extra=np.frombuffer(stored.extra_token_ids, dtype="<i4"),
            token_ids=np.frombuffer(stored.token_ids, dtype="<i4"),
            log_probs=np.frombuffer(stored.log_probs, dtype="<f4"),
            segments=tuple(VersionSegment(s.start, s.end, s.policy_version) for s in stored.segments),
            sampling=sampling_from_proto(stored.sampling),
            finish_reason=FINISH_FROM_PROTO.get(stored.finish_reason, "stop"), server_id=stored.server_id,
            finished_at_ms=stored.finished_at_ms,
        )  # fmt: skip


@dataclass
class SessionTree:
    """All calls of a session, in the order in which they were recorded. Calls are only ever added."""

    list_name: str = ""
    """Name of the stored list that the calls are read from. A session that expired and began again has another one."""
    calls: list[Call] = field(default_factory=list)
    by_key: dict[bytes, int] = field(default_factory=dict)
    """The newest call after which the conversation has this key."""
    text_lengths: set[int] = field(default_factory=set)
    """Characters after which a recorded conversation of plain text ends."""
    num_bytes: int = 1024
    """About how much memory the tree takes."""
    _numbers: dict[str, int] = field(default_factory=dict)

    def add(self, entries: Iterable[bytes]) -> None:
        """Add stored calls. An entry that repeats a call is kept as a call without an answer, because the numbers of
        calls are their places in the list."""
        for entry in entries:
            stored = sessions_pb2.SessionCall.FromString(entry)
            call = Call.of(stored)
            self.num_bytes += len(entry) + 512
            if call.call_id in self._numbers:
                first = self._numbers[call.call_id]
                none = np.empty(0, dtype=np.int32)
                call = Call("", first, self.calls[first].num_tokens, none, none, none.astype(np.float32), (),
                            call.sampling, call.finish_reason, call.server_id)  # fmt: skip
            else:
                self._numbers[call.call_id] = len(self.calls)
                self.by_key |= dict.fromkeys(stored.conversation_keys, len(self.calls))
                if stored.num_chars:
                    self.text_lengths.add(stored.num_chars)
            self.calls.append(call)

    def prompt_ids(self, number: int) -> Ids:
        call = self.calls[number]
        return np.concatenate([*self._pieces(call.base, call.num_shared), call.extra])

    def ids(self, number: int) -> Ids:
        return np.concatenate(self._pieces(number, self.calls[number].num_tokens))

    def parent(self, number: int) -> int | None:
        """The call that this one continues."""
        call = self.calls[number]
        continues = call.base >= 0 and call.num_shared == self.calls[call.base].num_tokens
        return call.base if continues else None

    def split(self, prompt: Ids, guess: int | None) -> tuple[int, int]:
        """The call that a prompt shares most ids with, and how many. `guess` is tried first; (-1, 0) for none."""
        if guess is not None and num_shared_ids(self.ids(guess), prompt) == self.calls[guess].num_tokens:
            return guess, self.calls[guess].num_tokens
        best = (-1, 0)
        for number in range(len(self.calls) - 1, max(-1, len(self.calls) - 1 - MAX_COMPARED), -1):
            if min(self.calls[number].num_tokens, len(prompt)) <= best[1]:
                continue
            if (shared := num_shared_ids(self.ids(number), prompt)) > best[1]:
                best = (number, shared)
        return best

    def trained_paths(self) -> list[tuple[tuple[int, ...], frozenset[int]]]:
        """The numbers of the calls of each path, in order, and those that are trained in it. Every call with sampled
        tokens is on at least one path, and is trained in the first one that has it."""
        lines = [self._line(number) for number, call in enumerate(self.calls) if len(call.token_ids)]
        inner = {number for line in lines for number in line[:-1]}
        found, trained = [], set[int]()
        for line in lines:
            if line[-1] in inner:
                continue
            new = frozenset(line) - trained
            trained |= new
            found.append((line, new))
        return found

    def cached_tokens(self, number: int, server_id: str) -> int:
        """How many ids of the prompt and the answer of a call the server has computed before, as far as this session
        knows: those of the longest conversation of it that the server has answered."""
        shared = self.calls[number].num_tokens
        while number >= 0:
            call = self.calls[number]
            if call.server_id == server_id:
                return min(shared, call.num_tokens)
            shared, number = min(shared, call.num_shared), call.base
        return 0

    def _line(self, number: int) -> tuple[int, ...]:
        line = [number]
        while (parent := self.parent(line[-1])) is not None:
            line.append(parent)
        return tuple(reversed(line))

    def _pieces(self, number: int, num_tokens: int) -> Sequence[Ids]:
        """The first `num_tokens` ids of a call's prompt and answer."""
        pieces: list[Ids] = [np.empty(0, dtype=np.int32)]
        while number >= 0 and num_tokens > 0:
            call = self.calls[number]
            if num_tokens > call.num_prompt_tokens:
                pieces.append(call.token_ids[: num_tokens - call.num_prompt_tokens])
                num_tokens = call.num_prompt_tokens
            if num_tokens > call.num_shared:
                pieces.append(call.extra[: num_tokens - call.num_shared])
                num_tokens = call.num_shared
            number = call.base
        return pieces[::-1]


def num_shared_ids(one: Ids, other: Ids) -> int:
    """How many ids both begin with."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
