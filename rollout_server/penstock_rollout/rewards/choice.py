"""Chooses the reward of each data source."""

from __future__ import annotations

import fnmatch
import json
import logging
from collections.abc import Mapping
from typing import TypeVar

from pydantic import TypeAdapter

from penstock.config.rewards import FunctionReward, Reward, RewardConfig
from penstock.store.notices import Event, PostEvent, ignore_event
from penstock_rollout.rewards.kinds import DATA_SOURCES, VERL_DATA_SOURCES, Settings

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
            self._chosen[data_source] = self._choose(data_source)
        return self._chosen[data_source]

    def configured(self) -> list[Reward]:
        """The rewards that the config names itself. The server checks that these work when it starts."""
        rewards = [*self.config.by_data_source.values(), self.config.default]
        return [*rewards, self._function()] if self.config.function_file else rewards

    def timeout_s(self, reward: Reward) -> float:
        return reward.timeout_s or self.config.timeout_s

    def settings(self, reward: Reward) -> Settings:
        """The settings as plain data, for reward processes, which do not import the config models."""
        return reward.model_dump(mode="json") | {"timeout_s": self.timeout_s(reward)}

    def settings_json(self, reward: Reward) -> str:
        """The settings as JSON text. Reward processes use this text as the key of a reward."""
        if reward not in self._settings_json:
            self._settings_json[reward] = json.dumps(self.settings(reward), sort_keys=True)
        return self._settings_json[reward]

    def is_known(self, data_source: str) -> bool:
        """Whether a data source has a reward of its own, which is not `rollout.reward.default`."""
        return self._find_own(data_source) is not None

    def unknown_text(self, data_source: str) -> str:
        """What is done with a data source that is not known, and what to do about it."""
        return (
            f"unknown data source {data_source!r}; scoring it with rollout.reward.default "
            f"({self.config.default.kind}). To choose another reward, add it to rollout.reward.by_data_source"
        )

    def _choose(self, data_source: str) -> Reward:
        if (reward := self._find_own(data_source)) is not None:
            return reward
        text = self.unknown_text(data_source)
        logger.warning("%s", text)
        self.post(Event("default_reward", data_source, text))
        return self.config.default

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
