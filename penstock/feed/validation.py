"""Validation: scoring the policy on held-out prompts every `dataset.validation.every_steps` steps, during training."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from penstock.codec import encode_prompt
from penstock.config.dataset import ValidationConfig
from penstock.config.run import RunConfig
from penstock.errors import DeadlineExceeded, InvalidInput, QueueFull, Unavailable
from penstock.feed.dataset_feed import RETRY_S, seeded
from penstock.feed.datasets import read_files, shown_files
from penstock.feed.run_end import RunEnd
from penstock.replay.queue import PromptIntake
from penstock.replay.queue_types import VALIDATION, Evaluation
from penstock.sample_scores import ACCURACY
from penstock.step_history import VALIDATIONS
from penstock.store.fleet import SERVING_STATES, Fleet, PolicyRegistry, ServerRecord
from penstock.trajectory import Prompt

logger = logging.getLogger(__name__)
HOLD_POLL_S = 0.25
STABLE_S = 1.5
"""How long the reported version must stay the same: a push that began before the pin may still move the server."""
STABLE_TIMEOUT_S = 120.0
RETURN_TIMEOUT_S = 2.0
"""How long a moved server may take to return to its pinned version, doubled each time. Then the pin follows it."""


@dataclass
class VersionHold:
    """Pins an evaluation, and one server to answer it, to the version that this server has. The others follow training.

    `note` is a file that names both, so that the next process can unpin what a killed one left. If the server is lost
    or moves on, the hold ends, and all servers answer the remaining prompts."""

    policies: PolicyRegistry
    fleet: Fleet
    note: Path
    max_silence_s: float
    num_servers: int
    """Number of servers that the run starts with. The first evaluation waits `join_timeout_s` for two."""
    join_timeout_s: float
    _has_begun = False
    _server_id = ""
    _version = -1

    async def begin(self, evaluation_id: str) -> None:
        """Pin a server and the evaluation, before it is created. A server that is alone is needed for training."""
        await self.end()
        free = await self._free_servers()
        if len(free) < 2 or evaluation_id in await self.policies.pins():
            return
        chosen = max(free, key=lambda server: (server.policy_version, -server.running_groups))
        self.note.parent.mkdir(parents=True, exist_ok=True)
        self.note.write_text(json.dumps([chosen.server_id, evaluation_id]))
        self._server_id = chosen.server_id
        if await self._pin_until_stable(chosen.policy_version):
            await self.policies.pin(evaluation_id, self._version)
            logger.info("%s answers %s with version %d", self._server_id, evaluation_id, self._version)
        else:
            logger.warning("%s cannot be held at a version; all servers answer %s", self._server_id, evaluation_id)
            await self.end()

    async def keep(self) -> None:
        """Check the server, and end the hold if it can no longer answer."""
        if not self._server_id:
            return
        server = await self._server()
        if server is None or server.policy_version != self._version:
            logger.warning("%s is no longer held at version %d; all servers answer", self._server_id, self._version)
            await self.end()

    async def end(self) -> None:
        """Unpin what this process, or one that was killed, has pinned."""
        self._server_id = ""
        try:
            pinned = json.loads(self.note.read_text())
        except FileNotFoundError:
            return
        except ValueError:  # incomplete after a crash of the machine: nothing was pinned yet
            pinned = []
        for name in pinned:
            await self.policies.unpin(name)
        self.note.unlink(missing_ok=True)

    async def _free_servers(self) -> list[ServerRecord]:
        """Servers that serve and are not pinned. A run that has just started gets time until it has two."""
        deadline = time.monotonic() + (0 if self._has_begun else self.join_timeout_s)
        self._has_begun = True
        while True:
            alive, pins = await self._alive(), await self.policies.pins()
            free = [s for s in alive if s.state in SERVING_STATES and s.server_id not in pins]
            num_pinned = sum(server.server_id in pins for server in alive)
            may_come = max(self.num_servers, len(alive)) - num_pinned >= 2
            if len(free) >= 2 or not may_come or time.monotonic() >= deadline:
                return free
            await asyncio.sleep(HOLD_POLL_S)

    async def _pin_until_stable(self, version: int) -> bool:
        """Pin the server until it reports the version for STABLE_S. If a push moves it, the pin follows it."""
        await self.policies.pin(self._server_id, version)
        self._version, return_timeout_s = version, RETURN_TIMEOUT_S
        agreed_at = pinned_at = time.monotonic()
        deadline = pinned_at + STABLE_TIMEOUT_S
        while time.monotonic() < deadline:
            await asyncio.sleep(HOLD_POLL_S)
            server, now = await self._server(), time.monotonic()
            if server is None:
                return False
            if server.policy_version == self._version and server.state == "READY":
                if now - agreed_at >= STABLE_S:
                    return True
                continue
            agreed_at = now
            if server.policy_version != self._version and now - pinned_at >= return_timeout_s:
                self._version, pinned_at = server.policy_version, now
                return_timeout_s *= 2
                await self.policies.pin(self._server_id, self._version)
        return False

    async def _server(self) -> ServerRecord | None:
        return next((s for s in await self._alive() if s.server_id == self._server_id), None)

    async def _alive(self) -> list[ServerRecord]:
        """Servers with a fresh heartbeat that may answer."""
        quarantined = await self.fleet.quarantined()
        return [
            server
            for server in await self.fleet.servers()
            if server.heartbeat_age_ms < 1000 * self.max_silence_s and server.server_id not in quarantined
        ]


POLL_S = 0.5


@dataclass
class Validator:
    """Creates an evaluation for each step that is due, and appends one line to `results` when it is finished.

    An evaluation is named after its step, so a restarted validator repeats none. A step that passes while another
    evaluation runs is skipped. With a `hold`, one server answers with one version."""

    queue: PromptIntake
    prompts: Sequence[Prompt]
    config: ValidationConfig
    name: str
    results: Path
    stall_timeout_s: float
    """How long an evaluation may go without a finished prompt."""
    run_end: RunEnd
    hold: VersionHold | None = None

    @classmethod
    def read(cls, config: RunConfig, queue: PromptIntake, hold: VersionHold | None = None) -> Validator:
        validation = config.dataset.validation
        assert validation.file is not None
        files = read_files(validation.file, config.dataset, validation.num_samples, validation.sampling)
        rows = [(file, row) for file, (_, rows) in enumerate(files) for row in rows]
        parts: dict[tuple[int, str], list[Prompt]] = {}
        for number, (file, row) in enumerate(rows):
            # Every step uses the same seeds, so that scores differ by the policy and not by the draw.
            parts.setdefault((file, row.data_source), []).append(seeded(row, config.seed, number))
        # Text is written of the first prompts, so files and data sources take turns.
        prompts = [prompt for turn in zip_longest(*parts.values()) for prompt in turn if prompt is not None]
        if not prompts:
            raise InvalidInput(shown_files(validation.file), "holds no prompts")
        # A prompt may fail once for each attempt before it counts as finished.
        stall_timeout_s = config.replay.max_attempts * config.rollout.prompt_timeout_s + config.replay.lease_ttl_s
        results, name, run_end = config.folder / VALIDATIONS, config.dataset.name, RunEnd(queue, config)
        return cls(queue, prompts, validation, name, results, stall_timeout_s, run_end, hold)

    async def run(self) -> None:
        """Validate until the last policy is validated. Tries again while Redis is away or full, or after a stall."""
        done = validated_steps(self.results)
        while True:
            try:
                if self.hold is not None:  # one of a process that was killed, or that could not be ended
                    await self.hold.end()
                has_ended, step = await self.run_end.is_reached(), (await self.queue.stat()).step
                step = step if has_ended else step // self.config.every_steps * self.config.every_steps
                if step not in done and (step > 0 or has_ended or self.config.before_train):
                    await self.validate(step)
                    done.add(step)
                if has_ended and step in done:
                    return
            except (QueueFull, Unavailable, DeadlineExceeded) as error:
                logger.warning("cannot validate: %s; trying again", error)
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(POLL_S)

    async def validate(self, step: int) -> Evaluation:
        """Score every prompt and write the result. Raises DeadlineExceeded if none finishes for `stall_timeout_s`."""
        name = evaluation_id(self.name, step)
        try:
            if self.hold is not None:
                await self.hold.begin(name)
            evaluation = await self._finished(name)
        finally:
            if self.hold is not None:
                await self.hold.end()
        scores = {
            f"{source or self.name}/{name if name.startswith(ACCURACY) else f'reward/{name}'}": value
            for source, named in evaluation.by_source.items()
            for name, value in named.items()
        }
        parts = {
            f"{source or self.name}/{part}/mean": mean
            for source, means in evaluation.parts.items()
            for part, mean in means.items()
            if not any(name.startswith(f"{part}/") for name in evaluation.by_source.get(source, ()))
        }
        passed = {f"{self.name}/pass@{k}": share for k, share in sorted(evaluation.pass_at.items())[-1:]}
        await self.queue.record_scores(step, scores, passed | parts)
        self.results.parent.mkdir(parents=True, exist_ok=True)
        result = {"step": step} | asdict(evaluation)
        with self.results.open("a") as lines:
            lines.write(json.dumps(result) + "\n")
        logger.info("%s", result_line(result))
        if not evaluation.pass_at and evaluation.num_samples:
            logger.warning(
                "no reward of the validation at step %d has the part %r, so it has no pass@k; correct "
                "dataset.validation.score: the parts are %s", step, self.config.score,
                ", ".join(sorted({name for parts in evaluation.parts.values() for name in parts})) or "none",
            )  # fmt: skip
        if evaluation.num_failed:
            logger.warning(
                "validation at step %d: %d of %d prompts failed and are not in the score; the servers' logs say why",
                step, evaluation.num_failed, evaluation.num_prompts,
            )  # fmt: skip
        return evaluation

    async def _finished(self, name: str) -> Evaluation:
        payloads = [encode_prompt(replace(prompt, evaluation_id=name)) for prompt in self.prompts]
        await self.queue.create_evaluation(name, payloads)
        evaluation = await self.queue.get_evaluation(name, part=self.config.score)
        num_finished, progressed_at = evaluation.num_finished, time.monotonic()
        while evaluation.num_finished < evaluation.num_prompts:
            if evaluation.num_finished > num_finished:
                num_finished, progressed_at = evaluation.num_finished, time.monotonic()
            if time.monotonic() - progressed_at > self.stall_timeout_s:
                raise DeadlineExceeded(
                    f"{name} has {num_finished} of {evaluation.num_prompts} prompts, and none finished for "
                    f"{self.stall_timeout_s:.0f} s; are rollout servers READY, or is the run paused?"
                )
            await asyncio.sleep(POLL_S)
            if self.hold is not None:
                await self.hold.keep()
            evaluation = await self.queue.get_evaluation(name, part=self.config.score)
        return evaluation


def evaluation_id(dataset_name: str, step: int) -> str:
    return f"{VALIDATION}{dataset_name}-{step}"


def read_results(results: Path) -> list[dict[str, Any]]:
    """The results that are written, oldest first. The last line may be incomplete after a crash; it is ignored."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines() if line.endswith("}")]


def validated_steps(results: Path) -> set[int]:
    return {result["step"] for result in read_results(results)}


def result_line(result: Mapping[str, Any]) -> str:
    """A result in one line, for people: the mean over all samples, and pass@k."""
    passed = "".join(f"  pass@{k} {share:.3f}" for k, share in result["pass_at"].items())
    failed = f"  ({result['num_failed']} prompts failed)" if result.get("num_failed") else ""
    sources, parts = result.get("by_source", {}), result.get("parts", {})
    named = ""
    for source in sources:
        scores = sources[source] | parts.get(source, {})
        if len(sources) > 1 or len(scores) > 1:
            listed = "  ".join(f"{name.removesuffix('/mean')} {value:.3f}" for name, value in scores.items())
            named += f"  [{source or 'all'}: {listed}]"
    return f"validation at step {result['step']}: mean {result['score']:.3f}{passed}{named}{failed}"
