"""Validation: held-out prompts scored beside training, every so many steps."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from penstock.codec import encode_prompt
from penstock.config.dataset import ValidationConfig
from penstock.config.run import RunConfig
from penstock.errors import InvalidInput, QueueFull, Unavailable
from penstock.feed.datasets import read_prompts
from penstock.feed.feeding import RETRY_S, seeded
from penstock.feed.version_hold import VersionHold
from penstock.replay.contract import Evaluation, PromptIntake
from penstock.trajectory import Prompt, Sampling

logger = logging.getLogger(__name__)
POLL_S = 0.5


class Validator:
    """Creates an evaluation for each step that is due, and writes one line of `results` when it is finished.

    An evaluation is named by its step, so that one killed and started again repeats none. A step that passed while
    another evaluation ran is left out. With a `hold`, one server answers it with one version; without, samples may span
    versions, and the range is in the result."""

    def __init__(
        self, queue: PromptIntake, prompts: Sequence[Prompt], config: ValidationConfig, name: str, results: Path,
        hold: VersionHold | None = None,
    ) -> None:  # fmt: skip
        self.queue = queue
        self.prompts = prompts
        self.config = config
        self.name = name
        self.results = results
        self.hold = hold

    @classmethod
    def read(cls, config: RunConfig, queue: PromptIntake, hold: VersionHold | None = None) -> Validator:
        validation = config.dataset.validation
        assert validation.file is not None
        sampling = Sampling(validation.temperature, validation.top_p, validation.max_tokens)
        rows = read_prompts(validation.file, num_samples=validation.num_samples, sampling=sampling)
        # The same seeds at every step: scores differ by the policy, not by the draw.
        prompts = [seeded(prompt, config.seed, number) for number, prompt in enumerate(rows)]
        if not prompts:
            raise InvalidInput(str(validation.file), "holds no prompts")
        return cls(queue, prompts, validation, config.dataset.name, config.folder / "validation.jsonl", hold)

    async def run(self) -> None:
        """Until it is cancelled. Waits while Redis is away or full."""
        done, is_free = validated_steps(self.results), self.hold is None
        while True:
            try:
                if self.hold is not None and not is_free:
                    await self.hold.end()
                    is_free = True
                step = (await self.queue.stat()).step // self.config.every_steps * self.config.every_steps
                if step not in done:
                    await self.validate(step)
                    done.add(step)
            except (QueueFull, Unavailable) as error:
                logger.warning("cannot validate: %s; trying again", error)
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(POLL_S)

    async def validate(self, step: int) -> Evaluation:
        """Score every prompt, and write the result down."""
        evaluation_id = f"validation-{self.name}-{step}"
        try:
            if self.hold is not None:
                await self.hold.begin(evaluation_id)
            evaluation = await self._finished(evaluation_id)
        finally:
            if self.hold is not None:
                await self.hold.end()
        self.results.parent.mkdir(parents=True, exist_ok=True)
        with self.results.open("a") as lines:
            lines.write(json.dumps({"step": step} | asdict(evaluation)) + "\n")
        passed = "  ".join(f"pass@{k} {share:.3f}" for k, share in evaluation.pass_at.items())
        logger.info("validation at step %d: mean@%d %.3f  %s", step, self.config.num_samples, evaluation.score, passed)
        return evaluation

    async def _finished(self, evaluation_id: str) -> Evaluation:
        payloads = [encode_prompt(replace(prompt, evaluation_id=evaluation_id)) for prompt in self.prompts]
        evaluation = await self.queue.create_evaluation(evaluation_id, payloads)
        while evaluation.num_finished < evaluation.num_prompts:
            await asyncio.sleep(POLL_S)
            if self.hold is not None:
                await self.hold.keep()
            evaluation = await self.queue.get_evaluation(evaluation_id)
        return evaluation


def validated_steps(results: Path) -> set[int]:
    """Steps whose result is written. The last line may be cut, by a machine that went down."""
    if not results.exists():
        return set()
    return {json.loads(line)["step"] for line in results.read_text().splitlines() if line.endswith("}")}
