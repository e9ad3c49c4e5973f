"""Makes a scored group from a leased prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from penstock.codec import check_group
from penstock.errors import PenstockError
from penstock.logs import bind
from penstock.replay.queue_types import Lease
from penstock.tracing import Tracing
from penstock.trajectory import Group, Prompt, Trajectory
from penstock_rollout.agents.episode import Episode, RewardUse, combine_rewards, token_rewards_of
from penstock_rollout.agents.loops import Agents
from penstock_rollout.agents.saved_samples import SampleProgress, SavedSample, TokenSaver
from penstock_rollout.agents.transcript import AgentContext, AgentLoop
from penstock_rollout.engines.engine import Engine
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.function import SampleScore, place_scores
from penstock_rollout.tokenization import Tokenization

NoteRunning = Callable[[int, int], None]


class Scoring(Protocol):
    async def score(
        self, prompt: str, data_source: str, responses: list[str], ground_truth: Any, extra_info: dict[str, Any],
        sample_infos: Sequence[Mapping[str, Any]] = (),
    ) -> list[SampleScore]:  # fmt: skip
        """Return the score of each response of one prompt. `sample_infos` adds to the `extra_info` of each."""


class SampleAborted(PenstockError):
    """The engine ended a sample before it was finished."""


@dataclass(eq=False)
class GroupMaker:
    """Generates all samples of a prompt at once, then scores them."""

    run: str
    server_id: str
    engine: Engine
    tokenization: Tokenization
    scorer: Scoring
    metrics: RolloutMetrics
    agents: Agents
    greedy_baseline: bool = False
    """Whether groups for training get one more sample, decoded greedily, as the baseline of the others."""
    tracing: Tracing = field(default_factory=Tracing)
    saver: TokenSaver | None = None
    """Saves the tokens of unfinished groups. None if they are not saved."""

    async def make(self, lease: Lease, prompt: Prompt, note_running: NoteRunning = lambda running, all: None) -> Group:
        """Generate and score all samples of the prompt. Cancelling this aborts the samples that still run. Samples that
        an earlier lease has finished or begun are taken over. `note_running` is called whenever a sample ends, with the
        number of samples that still run and the number of all samples."""
        bind(policy_version=self.engine.policy_version)
        agent_name = self.agents.name_of(prompt.agent_name)
        agent = self.agents.find(prompt.agent_name)
        saved = await self.saver.read(lease, prompt, self.engine.policy_version) if self.saver else {}
        contexts = self._contexts(lease, prompt, saved)
        with self.tracing.span("generate", prompt.trace_parent, policy_version=self.engine.policy_version):
            episodes = await self._episodes(agent, agent_name, contexts, note_running)
        if any(episode.is_aborted for episode in episodes):
            raise SampleAborted("a sample was aborted by the engine")
        responses = [
            self.tokenization.text(episode.token_ids[self._scored_start(episode) :].tolist()) for episode in episodes
        ]
        with self.tracing.span("reward", prompt.trace_parent, data_source=prompt.data_source):
            scores = await self.scorer.score(
                f"prompt {lease.prompt_id}", prompt.data_source, responses, prompt.ground_truth,
                prompt.extra_info, [episode.info_for_rewards for episode in episodes],
            )  # fmt: skip
        how = self.agents.config.turn_rewards
        trajectories = tuple(
            replace(
                _trajectory(episode, score, how, self._placed(episode, score), is_baseline=index >= prompt.num_samples),
                server_ids=() if episode.server_ids == (self.server_id,) else episode.server_ids,
            )
            for index, (episode, score) in enumerate(zip(episodes, scores, strict=True))
        )
        group = Group(
            run=self.run,
            prompt_id=lease.prompt_id,
            attempt=lease.attempt,
            server_id=self.server_id,
            data_source=prompt.data_source,
            sampling=prompt.sampling,
            prompt_token_ids=np.array(contexts[0].prompt_token_ids, dtype=np.int32),
            trajectories=trajectories,
            agent_name=agent_name,
            finished_at_ms=int(time.time() * 1000),
            trace_parent=prompt.trace_parent,
        )
        check_group(group)
        self.metrics.record_samples(
            prompt.data_source,
            turns=[episode.num_turns for episode in episodes],
            num_tokens=[len(episode.token_ids) for episode in episodes],
            version_spans=[trajectory.max_version - trajectory.min_version for trajectory in trajectories],
            num_truncated=sum(episode.finish_reason == "length" for episode in episodes),
        )
        return group

    async def _episodes(
        self, agent: AgentLoop, agent_name: str, contexts: Sequence[AgentContext], note_running: NoteRunning
    ) -> list[Episode]:
        """Run the agent once per context. A finished sample is saved at once: its siblings may be slow."""
        num_running = len(contexts)

        async def sample(context: AgentContext) -> Episode:
            nonlocal num_running
            saved = context.progress.saved if context.progress else None
            episode = saved.episode if saved and saved.episode else await agent(context)
            num_running -= 1
            note_running(num_running, len(contexts))
            is_new = saved is None or saved.episode is None
            if context.progress and is_new and isinstance(episode, Episode) and not episode.is_aborted:
                context.progress.finish(episode)
            return episode

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(sample(context)) for context in contexts]
        return [_episode(task, agent_name) for task in running]

    def _contexts(self, lease: Lease, prompt: Prompt, saved: Mapping[int, SavedSample]) -> list[AgentContext]:
        """One context per sample. They differ in request id and seed. The baseline comes last."""
        toolbox = self.agents.toolbox_for(prompt)
        prompt_ids = self.tokenization.prompt_ids(prompt, toolbox.schemas)
        seed = prompt.sampling.seed
        samplings = [
            replace(prompt.sampling, seed=None if seed is None else seed + index) for index in range(prompt.num_samples)
        ]
        if self.greedy_baseline and not prompt.evaluation_id:
            samplings.append(replace(prompt.sampling, temperature=0.0, top_p=1.0, seed=None))
        saver = self.saver if self.saver and self.saver.every_tokens else None
        return [
            AgentContext(
                engine=self.engine,
                tokenization=self.tokenization,
                request_id=f"{lease.prompt_id}.{lease.attempt}.{index}",
                prompt=prompt,
                prompt_token_ids=prompt_ids,
                sampling=sampling,
                config=self.agents.config,
                max_model_len=self.agents.max_model_len,
                toolbox=toolbox,
                parse_calls=self.agents.parse_calls,
                interactions=self.agents.interactions,
                metrics=self.metrics,
                progress=SampleProgress(saver, lease, index, saved.get(index)) if saver else None,
            )
            for index, sampling in enumerate(samplings)
        ]

    def _scored_start(self, episode: Episode) -> int:
        return episode.last_turn_start if self.agents.config.scored_text == "last_turn" else 0

    def _placed(self, episode: Episode, score: SampleScore) -> dict[int, float]:
        """The reward function's scores of parts of the response, by token."""
        start = self._scored_start(episode)
        ids = episode.token_ids[start:].tolist()
        return place_scores(
            score.placed, episode.loss_mask.tolist(), start, lambda n: len(self.tokenization.text(ids[:n]))
        )


def _episode(task: asyncio.Task[Episode], agent_name: str) -> Episode:
    """The agent's result. A custom agent may have cancelled itself or returned something else."""
    episode = None if task.cancelled() else task.result()
    if not isinstance(episode, Episode):
        raise PenstockError(f"agent {agent_name} returned {type(episode).__name__}; it must return an Episode")
    return episode


def _trajectory(
    episode: Episode, score: SampleScore, how: RewardUse, placed: Mapping[int, float], *, is_baseline: bool
) -> Trajectory:
    reward, parts = combine_rewards((score.reward, score.parts), episode, how)
    return Trajectory(
        **episode.trajectory_fields,
        reward=reward,
        reward_parts=parts,
        is_baseline=is_baseline,
        reward_failed=score.failed,
        answer=score.answer,
        token_rewards=token_rewards_of(episode, how, placed),
    )
