"""Chooses the reward of each data source, and scores responses in separate processes, each with a deadline. Failures
are counted and never raised. A remote reward POSTs the four arguments of compute_score and reads a number or
{"score": ...} from the reply."""

from __future__ import annotations

import asyncio
import fnmatch
import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter

from penstock.cancellation import end_task
from penstock.config.rollout import FunctionReward, RemoteReward, Reward, RewardConfig, RewardModelReward
from penstock.errors import ConfigError
from penstock.store.notices import Event, PostEvent, ignore_event
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.function import (
    DATA_SOURCES,
    VERL_DATA_SOURCES,
    PlacedScore,
    SampleScore,
    read_score,
)
from penstock_rollout.rewards.pool import Json, RewardFailed, RewardPool

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class JsonService:
    """Client of a service that answers JSON. `timeout_s` is the deadline of one attempt; the caller limits all."""

    def __init__(
        self, url: str, timeout_s: float, max_connections: int, transport: httpx.AsyncBaseTransport | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.url = url
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=max_connections),
            transport=transport,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def post(self, body: Json, note_failure: Callable[[str], None] = lambda failure: None) -> httpx.Response:
        """POST until the service answers with a status other than 429 and 5xx. The caller sets a deadline.
        `note_failure` is called with the reason of each attempt that failed: the service may be starting, or the
        network may be down for a moment."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                response = await self._http.post(self.url, json=body)
            except httpx.TransportError as error:
                note_failure(f"{type(error).__name__} {error}".strip())
            else:
                if response.status_code != httpx.codes.TOO_MANY_REQUESTS and not response.is_server_error:
                    return response
                note_failure(f"status {response.status_code}")
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class RemoteScorer(JsonService):
    """Client of one reward service. It needs no reward process, because it only waits."""

    def __init__(self, reward: RemoteReward, transport: httpx.AsyncBaseTransport | None = None) -> None:
        headers = bearer_headers(reward.api_key_file)
        super().__init__(reward.url, reward.attempt_timeout_s, reward.max_concurrent, transport, headers)
        self._free = asyncio.Semaphore(reward.max_concurrent)

    async def compute(self, arguments: Json, timeout_s: float) -> SampleScore:
        """Compute one reward. The deadline starts when a connection is free. A timeout names the last failure."""
        async with self._free:
            failures = ["no reply"]
            try:
                async with asyncio.timeout(timeout_s):
                    return _read(await self.post(arguments, failures.append))
            except TimeoutError as error:
                raise RewardFailed(
                    "timeout", f"{self.url} gave no score within {timeout_s:g} s ({failures[-1]})"
                ) from error


def _read(response: httpx.Response) -> SampleScore:
    if not response.is_success:
        raise RewardFailed("exception", f"{response.url} answered {response.status_code}: {response.text[:200]!r}")
    try:
        return read_score(response.json())
    except ValueError as error:
        raise RewardFailed("exception", f"{response.url} answered {response.text[:200]!r}: {error}") from error


def bearer_headers(api_key_file: Path | None) -> dict[str, str]:
    """The headers that carry the key of a file, which is read again at every call."""
    if api_key_file is None:
        return {}
    try:
        return {"Authorization": f"Bearer {api_key_file.read_text().strip()}"}
    except OSError as error:
        raise ConfigError(
            f"api_key_file {api_key_file} cannot be read ({error.strerror}); check the path and its permissions"
        ) from error


logger = logging.getLogger(__name__)
T = TypeVar("T")
_REWARD: TypeAdapter[Reward] = TypeAdapter(Reward)


class RewardChoice:
    """Looks a data source up in `by_data_source`, `function_file`, the built-in table and `default`, in this order.

    In each table an exact name wins over a pattern."""

    def __init__(self, config: RewardConfig, post: PostEvent = ignore_event) -> None:
        self.config = config
        self.post = post
        self._chosen: dict[str, Reward] = {}
        self._settings_json: dict[Reward, str] = {}

    def reward_for(self, data_source: str) -> Reward:
        if data_source not in self._chosen:
            reward = self._find_own(data_source)
            if reward is None:
                reward, text = self.config.default, self.unknown_text(data_source)
                logger.warning("%s", text)
                self.post(Event("default_reward", data_source, text))
            self._chosen[data_source] = reward
        return self._chosen[data_source]

    def configured(self) -> list[Reward]:
        """The rewards that the config names itself. The server checks that these work when it starts."""
        rewards = [*self.config.by_data_source.values(), self.config.default]
        return [*rewards, self._function()] if self.config.function_file else rewards

    def timeout_s(self, reward: Reward) -> float:
        return reward.timeout_s or self.config.timeout_s

    def settings_json(self, reward: Reward) -> str:
        """The settings as JSON text, for reward processes, which do not import the config models. They use this text as
        the key of a reward."""
        if reward not in self._settings_json:
            settings = reward.model_dump(mode="json") | {"timeout_s": self.timeout_s(reward)}
            self._settings_json[reward] = json.dumps(settings, sort_keys=True)
        return self._settings_json[reward]

    def is_known(self, data_source: str) -> bool:
        """Whether a data source has its own reward, which is not `rollout.reward.default`."""
        return self._find_own(data_source) is not None

    def unknown_text(self, data_source: str) -> str:
        """What is done with a data source that is not known, and what to do about it."""
        return (
            f"unknown data source {data_source!r}; scoring it with rollout.reward.default "
            f"({self.config.default.kind}). To choose another reward, add it to rollout.reward.by_data_source"
        )

    def _find_own(self, data_source: str) -> Reward | None:
        if (reward := _find(self.config.by_data_source, data_source)) is not None:
            return reward
        if self.config.function_file is not None:
            return self._function()
        table = VERL_DATA_SOURCES if self.config.compat == "verl" else DATA_SOURCES
        settings = _find(table, data_source)
        return None if settings is None else _REWARD.validate_python(settings)

    def _function(self) -> FunctionReward:
        config = self.config
        assert config.function_file is not None
        return FunctionReward(
            kind="function", file=config.function_file, name=config.function_name, kwargs=config.function_kwargs,
            batch=config.function_batch,
        )  # fmt: skip


def _find(table: Mapping[str, T], data_source: str) -> T | None:
    if data_source in table:
        return table[data_source]
    return next((value for pattern, value in table.items() if fnmatch.fnmatchcase(data_source, pattern)), None)


class Scorer:
    """Scores the responses of each data source with its reward. Call `check` first, then `begin`, and `close` last."""

    def __init__(self, config: RewardConfig, metrics: RolloutMetrics, post: PostEvent = ignore_event) -> None:
        """`post` tells the run's users of failed rewards and of unknown data sources."""
        self.config = config
        self.metrics = metrics
        self.post = post
        self.choice = RewardChoice(config, post)
        self.num_scoring = 0
        """Prompts whose responses are being scored."""
        self._pool = RewardPool(config.num_processes)
        self._remotes: dict[RemoteReward, RemoteScorer] = {}
        self._filling: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Raise ConfigError if a reward that the config names cannot work here."""
        for reward in self.choice.configured():
            if isinstance(reward, RemoteReward):
                self._remote(reward)
            if not _needs_process(reward):
                continue
            try:
                await self._pool.prepare(self.choice.settings_json(reward))
            except RewardFailed as error:
                message = str(error).removeprefix("ConfigError: ")
                raise ConfigError(f"rollout.reward: {message} (kind {reward.kind})") from error

    def begin(self) -> None:
        """Start the reward processes in the background, so that the first responses need not wait for them."""
        rewards = [self.choice.settings_json(each) for each in self.choice.configured() if _needs_process(each)]
        if rewards:
            self._filling = asyncio.create_task(self._pool.fill(rewards), name="reward-processes")

    async def score(
        self, prompt: str, data_source: str, responses: list[str], ground_truth: Any, extra_info: dict[str, Any],
        sample_infos: Sequence[Mapping[str, Any]] = (),
    ) -> list[SampleScore]:  # fmt: skip
        """Return the score of each response of one prompt. A failed reward is `error_value`. `prompt` says which prompt
        it is, for example `prompt 17`. The log line of a failed reward names it. `sample_infos` adds to the
        `extra_info` of each response."""
        reward = self.choice.reward_for(data_source)
        extra_infos = [{**extra_info, **info} for info in sample_infos or [{}] * len(responses)]
        started = time.monotonic()
        self.num_scoring += 1
        try:
            if isinstance(reward, FunctionReward) and reward.batch:
                scored = await self._score_batch(reward, data_source, responses, ground_truth, extra_infos, prompt)
            else:
                shared = {"data_source": data_source, "ground_truth": ground_truth}
                samples = [
                    {**shared, "solution_str": response, "extra_info": info}
                    for response, info in zip(responses, extra_infos, strict=True)
                ]
                scored = [
                    self._failed(reward, answer, f"sample {index} of {prompt}", data_source)
                    if isinstance(answer, RewardFailed)
                    else answer
                    for index, answer in enumerate(await self._score_each(reward, samples))
                ]
        finally:
            self.num_scoring -= 1
        self.metrics.reward_seconds.observe(time.monotonic() - started)
        return scored

    async def close(self) -> None:
        if self._filling is not None:
            await end_task(self._filling)
        await self._pool.close()
        for remote in self._remotes.values():
            await remote.close()

    async def _score_each(self, reward: Reward, samples: list[Json]) -> Sequence[SampleScore | RewardFailed]:
        if isinstance(reward, RewardModelReward):
            return [SampleScore(0.0, {})] * len(samples)
        timeout_s = self.choice.timeout_s(reward)
        if isinstance(reward, RemoteReward):
            return await asyncio.gather(*(self._score_remotely(reward, sample, timeout_s) for sample in samples))
        answers = await self._pool.compute_each(self.choice.settings_json(reward), samples, timeout_s)
        return [answer if isinstance(answer, RewardFailed) else _sample_score(answer) for answer in answers]

    async def _score_remotely(self, reward: RemoteReward, sample: Json, timeout_s: float) -> SampleScore | RewardFailed:
        try:
            return await self._remote(reward).compute(sample, timeout_s)
        except RewardFailed as error:
            return error

    async def _score_batch(
        self, reward: FunctionReward, data_source: str, responses: list[str], ground_truth: Any,
        extra_infos: list[dict[str, Any]], prompt: str,
    ) -> list[SampleScore]:  # fmt: skip
        """The scores of a function that is called once for all samples. They fail together."""
        arguments = {
            "data_sources": [data_source] * len(responses),
            "solution_strs": responses,
            "ground_truths": [ground_truth] * len(responses),
            "extra_infos": extra_infos,
        }
        try:
            scores = await self._pool.compute(
                self.choice.settings_json(reward), arguments, self.choice.timeout_s(reward), "scores"
            )
            if len(scores) != len(responses):
                text = f"the reward function returned {len(scores)} scores for {len(responses)} samples"
                raise RewardFailed("exception", text, "WrongScore")
            return [_sample_score(score) for score in scores]
        except RewardFailed as error:
            failed = self._failed(reward, error, f"the {len(responses)} samples of {prompt}", data_source)
            self.metrics.reward_errors.labels(error.kind).inc(len(responses) - 1)
            return [failed] * len(responses)

    def _failed(self, reward: Reward, error: RewardFailed, sample: str, data_source: str) -> SampleScore:
        """Log, count and post the failure. Returns the score that the sample gets."""
        text = (
            f"the reward of {sample}, data source {data_source!r}, failed ({error.kind}): {error}; "
            f"the sample gets error_value {self.config.error_value:g}"
        )
        logger.warning("%s", text)
        self.metrics.reward_errors.labels(error.kind).inc()
        self.post(Event("reward_failed", f"{reward.kind} {error.place}", text, error.traceback))
        return SampleScore(self.config.error_value, {}, failed=True)

    def _remote(self, reward: RemoteReward) -> RemoteScorer:
        if reward not in self._remotes:
            self._remotes[reward] = RemoteScorer(reward)
        return self._remotes[reward]


def _sample_score(fields: Sequence[Any]) -> SampleScore:
    """The score in a worker's answer, where it is a list of its fields."""
    score = SampleScore(*fields)
    return score._replace(placed=tuple(PlacedScore(*one) for one in score.placed))


def _needs_process(reward: Reward) -> bool:
    return not isinstance(reward, RemoteReward | RewardModelReward)
