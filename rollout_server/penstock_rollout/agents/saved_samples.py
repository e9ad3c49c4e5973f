"""Saves the tokens of unfinished groups in the queue, so that another server can continue them.

| what                                     | saved                                                                    |
|------------------------------------------|--------------------------------------------------------------------------|
| a sample of the single-turn agent        | every `rollout.save_every_tokens` tokens, and when the server is drained |
| a finished sample of an unfinished group | at once, whichever agent made it                                         |

A sample is saved in pieces, each with the tokens since the piece before it; the last piece of a finished sample has its
episode. Any prefix of the pieces is a valid sample. Pieces of all samples are gathered for SAVE_S and sent in one
exchange, again if the store does not answer; no sample waits for it. A prompt whose piece was refused saves nothing
more: its lease is lost, the server is in quarantine, or there is no room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.codec import check_cover, decode_saved, encode_saved, trajectory_from_proto, trajectory_to_proto
from penstock.errors import PenstockError, PoisonGroup, QueueFull, Unavailable
from penstock.replay.queue import GroupProducer
from penstock.replay.queue_types import Lease, SavedTokens
from penstock.trajectory import Prompt, TokenReward, Trajectory, VersionSegment
from penstock.v1 import groups_pb2
from penstock_rollout.agents.episode import SHARED_FIELDS, Episode
from penstock_rollout.engines.engine import Engine, clip_segments
from penstock_rollout.metrics import RolloutMetrics

logger = logging.getLogger(__name__)
SAVE_S = 0.25
"""How long pieces are gathered before they are sent."""
RETRY_S = 1.0
"""Pause after an exchange that failed."""
MAX_PIECES, MAX_BYTES = 64, 2**20
"""Upper bounds on one exchange. A piece has about 1 KB, but more if it has the experts of a whole sample."""
_NUMBERS = ("num_turns", "last_turn_start", "num_user_turns")
_REWARDS = ("tool_rewards", "turn_scores", "turn_rewards")
"""Fields of an episode that SavedTokens has under the same names."""
MAX_WAITING = 4096
"""Pieces that wait while the store does not answer. Further ones are not saved."""


@dataclass(frozen=True)
class SavedSample:
    """The tokens of a sample that are known, from its start. All of them were sampled, unless `episode` is set."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    segments: tuple[VersionSegment, ...] = ()
    server_ids: tuple[str, ...] = ()
    """Servers that sampled it, in order."""
    episode: Episode | None = None
    """Set if the sample is finished."""
    is_handed_over: bool = False
    """Whether the last server stopped in order, so that it sampled nothing after these tokens."""

    @property
    def min_version(self) -> int:
        return min(segment.policy_version for segment in self.segments)


def encode_piece(
    token_ids: Sequence[int], log_probs: Sequence[float], segments: Iterable[VersionSegment], server_id: str,
    *, is_handed_over: bool,
) -> bytes:  # fmt: skip
    """Encode sampled tokens of an unfinished sample. `segments` count from the start of the response."""
    tokens = groups_pb2.Trajectory(
        token_ids=np.asarray(token_ids, dtype="<i4").tobytes(),
        log_probs=np.asarray(log_probs, dtype="<f4").tobytes(),
        segments=[groups_pb2.VersionSegment(**vars(segment)) for segment in segments],
    )
    return encode_saved(groups_pb2.SavedTokens(tokens=tokens, server_id=server_id, is_handed_over=is_handed_over))


def encode_episode(episode: Episode, server_id: str) -> bytes:
    """Encode a finished sample as its only piece."""
    trajectory = Trajectory(
        **episode.trajectory_fields,
        reward=0.0,
        reward_parts=episode.reward_parts,
        token_rewards=tuple(TokenReward(index, reward) for index, reward in sorted(episode.token_rewards.items())),
        server_ids=episode.server_ids or (server_id,),
    )
    own: dict[str, Any] = {name: getattr(episode, name) for name in (*_NUMBERS, *_REWARDS, "final_reward")}
    tokens = trajectory_to_proto(trajectory)
    return encode_saved(groups_pb2.SavedTokens(tokens=tokens, server_id=server_id, is_finished=True, **own))


def read_samples(pieces: Iterable[SavedTokens]) -> dict[int, SavedSample]:
    """The samples that were saved, by number. What does not follow from the start on, or is damaged, is skipped."""
    by_sample: dict[int, list[SavedTokens]] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.sample, piece.start)):
        by_sample.setdefault(piece.sample, []).append(piece)
    samples = {number: _joined(of_sample) for number, of_sample in by_sample.items()}
    return {number: sample for number, sample in samples.items() if sample.token_ids}


def _joined(pieces: Sequence[SavedTokens]) -> SavedSample:
    """A finished sample replaces what was saved before it was finished. It begins at 0, as the first piece does."""
    sample = SavedSample()
    for piece in pieces:
        try:
            saved = decode_saved(piece.payload)
            tokens = trajectory_from_proto(saved.tokens)
            if not saved.is_finished:
                check_cover("segments", tokens.segments, piece.start + len(tokens.token_ids), piece.start)
        except PoisonGroup:
            break
        if saved.is_finished:
            return _finished(saved, tokens)
        if piece.start != len(sample.token_ids) or len(tokens.log_probs) != len(tokens.token_ids):
            break
        sample = replace(
            sample,
            token_ids=sample.token_ids + tokens.token_ids.tolist(),
            log_probs=sample.log_probs + tokens.log_probs.tolist(),
            segments=sample.segments + tokens.segments,
            server_ids=tuple(dict.fromkeys((*sample.server_ids, saved.server_id))),
            is_handed_over=saved.is_handed_over,
        )
    return sample


def _finished(saved: groups_pb2.SavedTokens, tokens: Trajectory) -> SavedSample:
    fields: dict[str, Any] = {name: getattr(tokens, name) for name in SHARED_FIELDS}
    fields |= {name: getattr(saved, name) for name in _NUMBERS}
    fields |= {name: tuple(getattr(saved, name)) for name in _REWARDS}
    episode = Episode(
        **fields,
        token_rewards={given.index: given.reward for given in tokens.token_rewards},
        final_reward=saved.final_reward if saved.HasField("final_reward") else None,
        reward_parts=tokens.reward_parts,
        server_ids=tokens.server_ids,
    )
    return SavedSample(
        tokens.token_ids.tolist(), tokens.log_probs.tolist(), tokens.segments, tokens.server_ids, episode, True
    )


@dataclass(frozen=True)
class _Piece:
    lease: Lease
    sample: int
    start: int
    num_tokens: int
    encode: Callable[[], bytes]
    """Called in a thread when the piece is sent. Most pieces of short samples never are."""


@dataclass(eq=False)
class TokenSaver:
    """Saves and reads the tokens of the prompts that one server has leased. With `every_tokens` 0 it does nothing."""

    queue: GroupProducer
    engine: Engine
    server_id: str
    metrics: RolloutMetrics
    every_tokens: int
    max_staleness: int
    is_draining: bool = False
    """Whether samples that end as `aborted` are handed over to another server."""
    running: set[str] = field(default_factory=set)
    """Engine requests of the samples that another server can continue."""
    _pieces: list[_Piece] = field(default_factory=list)
    _refused: set[tuple[int, int]] = field(default_factory=set)
    """Prompt and attempt of the leases that save nothing more."""
    _added: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, lease: Lease, prompt: Prompt, policy_version: int) -> dict[int, SavedSample]:
        """What earlier leases saved of the prompt's samples and this one may use, by the number of the sample. Samples
        that are too old for the staleness bound are skipped, and so are samples of a held-out prompt with tokens of
        another version: its score would be that of a mixture."""
        if not self.every_tokens or lease.attempt == 1:
            return {}
        try:
            found = read_samples(await self.queue.saved_tokens(lease))
        except (QueueFull, Unavailable) as error:
            logger.warning("cannot read the saved tokens of prompt %d: %s", lease.prompt_id, error)
            return {}
        max_age = 0 if prompt.evaluation_id else self.max_staleness
        usable = {number: sample for number, sample in found.items() if policy_version - sample.min_version <= max_age}
        self._count_read(prompt, found, usable)
        if found and not usable:
            try:
                await self.queue.forget_tokens(self.server_id, lease)
            except (QueueFull, Unavailable) as error:
                logger.warning("cannot delete the saved tokens of prompt %d: %s", lease.prompt_id, error)
        return usable

    def _count_read(self, prompt: Prompt, found: dict[int, SavedSample], usable: dict[int, SavedSample]) -> None:
        """Count what is continued and what is generated again. What a lost server had sampled since it saved is not
        known: half of an interval, for each sample that it had not finished."""
        if not found:
            return
        stale = sum(len(sample.token_ids) for number, sample in found.items() if number not in usable)
        num_cut = sum(sample.episode is None and not sample.is_handed_over for sample in found.values())
        if not any(sample.is_handed_over and sample.episode is None for sample in found.values()):
            num_cut += max(0, prompt.num_samples - len(found))
        self.metrics.continued_tokens.inc(sum(len(sample.token_ids) for sample in usable.values()))
        self.metrics.regenerated_tokens.labels("stale").inc(stale)
        self.metrics.regenerated_tokens.labels("lost").inc(num_cut * self.every_tokens / 2)

    def add(self, piece: _Piece) -> None:
        if (piece.lease.prompt_id, piece.lease.attempt) not in self._refused:
            self._pieces.append(piece)
            self._added.set()

    def end(self, lease: Lease) -> None:
        """Forget a lease that has ended. Its pieces that were not sent are dropped."""
        self._refused.discard((lease.prompt_id, lease.attempt))
        self._pieces = [piece for piece in self._pieces if piece.lease is not lease]

    async def interrupt(self) -> bool:
        """End the samples that another server can continue: each hands over what it has. Returns whether any were."""
        if not self.running:
            return False
        self.is_draining = True
        try:
            await self.engine.interrupt(list(self.running))
        except PenstockError as error:
            logger.warning("the engine does not hand its samples over: %s", error)
        return True

    async def save_loop(self) -> None:
        while True:
            await self._added.wait()
            await asyncio.sleep(SAVE_S)
            if not await self.flush():
                await asyncio.sleep(RETRY_S)

    async def flush(self) -> bool:
        """Send all pieces that were added. Returns False if the store did not take all: they wait for the next call."""
        self._added.clear()
        pieces, self._pieces = self._pieces, []
        num_sent = 0
        try:
            while num_sent < len(pieces):
                num_sent += await self._send(pieces[num_sent : num_sent + MAX_PIECES])
        except (QueueFull, Unavailable) as error:
            logger.warning("cannot save the tokens of %d samples yet: %s", len(pieces) - num_sent, error)
            self._pieces = [*pieces[num_sent:], *self._pieces][:MAX_WAITING]
            self._added.set()
        return num_sent == len(pieces)

    async def _send(self, pieces: Sequence[_Piece]) -> int:
        """Send the first pieces, up to MAX_BYTES. Returns how many."""
        saved = await asyncio.to_thread(_encode, pieces)
        refused = set(await self.queue.save_tokens(self.server_id, saved))
        for piece in pieces[: len(saved)]:
            if piece.lease.prompt_id in refused:
                self._refused.add((piece.lease.prompt_id, piece.lease.attempt))
            else:
                self.metrics.saved_tokens.inc(piece.num_tokens)
        return len(saved)


def _encode(pieces: Sequence[_Piece]) -> list[tuple[Lease, SavedTokens]]:
    saved, num_bytes = [], 0
    for piece in pieces:
        payload = piece.encode()
        saved.append((piece.lease, SavedTokens(piece.sample, piece.start, payload)))
        num_bytes += len(payload)
        if num_bytes >= MAX_BYTES:
            break
    return saved


class SampleProgress:
    """One sample of a leased prompt: what was saved of it, and what is saved from now on."""

    def __init__(self, saver: TokenSaver, lease: Lease, number: int, saved: SavedSample | None) -> None:
        self.saver = saver
        self.lease = lease
        self.number = number
        self.saved = saved
        self._num_saved = 0 if saved is None else len(saved.token_ids)

    @contextmanager
    def sampling(self, request_id: str) -> Iterator[None]:
        """Within the block the engine samples it, and a drain can interrupt it."""
        self.saver.running.add(request_id)
        try:
            yield
        finally:
            self.saver.running.discard(request_id)

    def add(
        self, token_ids: Sequence[int], log_probs: Sequence[float], segments: Sequence[VersionSegment],
        *, is_last: bool = False,
    ) -> None:  # fmt: skip
        """Save the tokens that are new, if they are enough or no more follow. The arguments are the whole response.
        Raises PoisonGroup if a new log-prob is not finite: the group cannot be trained, and must not be continued."""
        start = self._num_saved
        num_new = len(token_ids) - start
        if not num_new or (num_new < self.saver.every_tokens and not is_last):
            return
        self._check(log_probs[start:])
        encode = partial(
            encode_piece, token_ids[start:], log_probs[start:], clip_segments(segments, start, len(token_ids)),
            self.saver.server_id, is_handed_over=is_last and self.saver.is_draining,
        )  # fmt: skip
        self.saver.add(_Piece(self.lease, self.number, start, num_new, encode))
        self._num_saved = len(token_ids)

    def finish(self, episode: Episode) -> None:
        """Save a finished sample. Raises PoisonGroup if a log-prob is not finite."""
        self._check(episode.log_probs)
        num_new = max(0, len(episode.token_ids) - self._num_saved)
        encode = partial(encode_episode, episode, self.saver.server_id)
        self.saver.add(_Piece(self.lease, self.number, 0, num_new, encode))

    def _check(self, log_probs: Sequence[float] | NDArray[np.float32]) -> None:
        if not np.isfinite(log_probs).all():
            where = f"sample {self.number} of prompt {self.lease.prompt_id}"
            raise PoisonGroup("non_finite", f"{where}: a log-prob is not finite")
