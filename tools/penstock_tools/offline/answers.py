"""Generates the missing answers of a store, with one engine in this process and the agents of a rollout server, and
scores the responses in a file. Scores come from the scorer of a rollout server in both."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from rich.console import Console

from penstock.cli.output import progress_bar
from penstock.codec import encode_prompt
from penstock.config.dataset import ColumnsConfig
from penstock.config.rollout import RewardConfig
from penstock.config.run import RunConfig
from penstock.errors import InvalidInput, PenstockError, Unavailable, first_error
from penstock.feed.datasets import nested_field, row_field
from penstock.hub import data_source_of
from penstock.logs import printing_to
from penstock.machine import written_whole
from penstock.replay.queue_types import Lease
from penstock.sample_scores import PromptSamples, ScoreSummary, by_source, parts_by_name, summarise
from penstock.sampling import Sampling
from penstock.trajectory import Prompt
from penstock_rollout.agents.loops import Agents
from penstock_rollout.agents.tool_calls import tokenization_of
from penstock_rollout.engines.factory import create_engine, start_engine
from penstock_rollout.groups.producer import GroupMaker
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.function import SampleScore
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.tokenization import PromptLength
from penstock_tools.offline.answer_store import AnswerRow, AnswerStore, reading_parquet

logger = logging.getLogger(__name__)


# ── generating ──


_LATER = {"kind": "reward_model"}
UNSCORED = RewardConfig.model_validate({"by_data_source": {"*": _LATER}, "default": _LATER})
"""Rewards that compute nothing, for generation without `--score`."""


def answer_missing(
    config: RunConfig, prompts: Sequence[Prompt], store: AnswerStore, *, concurrency: int | None, scored: bool,
    log: Path | None,
) -> float:  # fmt: skip
    """Answer the rows of its shard that the store lacks, and finish the store. The engine starts only if a row is
    missing, and prints to the file `log`, if there is one. Returns the seconds that it took, not counting the start of
    the engine."""
    started = time.monotonic()
    rows = store.shard.rows(len(prompts))
    missing = [(row, prompts[row]) for row in rows if row not in store.rows]
    if missing:
        try:
            with printing_to(log) as terminal:
                where = f"; its log: {log}" if log else ""
                print(f"starting the engine{where}", file=terminal, flush=True)
                started = asyncio.run(_answer_all(config, missing, store, concurrency, scored, len(rows), terminal))
        except asyncio.CancelledError:  # SIGTERM
            raise KeyboardInterrupt from None
    seconds = time.monotonic() - started
    store.finish(prompts)
    return seconds


async def _answer_all(
    config: RunConfig, missing: list[tuple[int, Prompt]], store: AnswerStore, concurrency: int | None, scored: bool,
    num_rows: int, terminal: TextIO,
) -> float:  # fmt: skip
    """Answer the missing rows. Returns the time, on the monotonic clock, at which the engine was ready."""
    main = asyncio.current_task()
    assert main is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    metrics = RolloutMetrics(CollectorRegistry())
    scorer = Scorer(config.rollout.reward if scored else UNSCORED, metrics)
    length = PromptLength(config.rollout.prompt, config.rollout.engine.max_model_len, metrics)
    tokenization = tokenization_of(config, length.fit)
    agents = Agents.load(config.rollout.agents, config.rollout.engine.max_model_len, tokenization)
    seed = config.seed + store.shard.index  # samples without a seed differ between shards, also of one prompt
    profiles = config.folder / "profiles" / f"generate-{store.shard.index}"
    engine = create_engine(config.rollout.engine, config.model.path, config.model.dtype, seed, profiles=profiles)
    maker = GroupMaker("generate", "generate", engine, tokenization, scorer, metrics, agents)
    # By default as many prompts as fill the engine with samples, and an eighth more, so that none of it stays free.
    at_once = concurrency or -(-config.rollout.engine.max_num_seqs * 9 // 8 // missing[0][1].num_samples)
    try:
        begun = time.monotonic()
        await scorer.check()
        await agents.open()
        with Console(file=terminal).status("starting"):
            await start_engine(engine, config.rollout.start_timeout_s)
        ready = time.monotonic()
        print(f"ready after {ready - begun:.0f} s; prompts to answer: {len(missing)}", file=terminal, flush=True)
        with progress_bar("generating", terminal) as progress:
            task = progress.add_task("", total=num_rows, completed=num_rows - len(missing))
            rows = iter(missing)

            async def work() -> None:
                for row, prompt in rows:
                    store.add(await _answer(maker, row, prompt, scored))
                    progress.advance(task)
                    if store.is_part_due:
                        await asyncio.to_thread(store.write_part)

            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(at_once, len(missing))):
                    tasks.create_task(work())
        return ready
    except* PenstockError as errors:
        raise first_error(errors) from None
    finally:
        # A forked EngineCore shares this process's wake-up pipe, so the SIGTERM that ends it arrives here too.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
        await engine.stop()
        await agents.close()
        await scorer.close()


async def _answer(maker: GroupMaker, row: int, prompt: Prompt, scored: bool) -> AnswerRow:
    """Answer one prompt. A prompt that cannot be answered fails only its own row; a failing engine ends the command."""
    try:
        group = await maker.make(Lease(row, 1, b""), prompt)
    except Exception as error:
        first = first_error(error)
        if isinstance(first, Unavailable) or not isinstance(first, PenstockError):
            raise
        logger.warning("row %d has no samples: %s", row, first)
        return AnswerRow(row, error=str(first))
    samples = group.trajectories
    return AnswerRow(
        row=row,
        responses=[maker.tokenization.text(sample.token_ids.tolist()) for sample in samples],
        token_ids=[sample.token_ids for sample in samples],
        log_probs=[sample.log_probs for sample in samples],
        loss_masks=[sample.loss_mask for sample in samples],
        finish_reasons=[sample.finish_reason for sample in samples],
        rewards=[sample.reward for sample in samples] if scored else None,
    )


def describe_settings(config: RunConfig, file: Path, prompts: Sequence[Prompt], *, scored: bool) -> dict[str, str]:
    """Settings by name. The same command on the same files gives the same settings."""
    digest = hashlib.sha256()
    for prompt in prompts:
        encoded = encode_prompt(replace(prompt, sampling=Sampling(), num_samples=1))
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    engine, prompt_config = config.rollout.engine, config.rollout.prompt
    return {
        "prompts": f"{file.name}, {len(prompts)} prompts, sha256 {digest.hexdigest()[:16]}",
        "model": str(config.model.path.resolve()),
        "dtype": config.model.dtype,
        "engine": f"{engine.name}, max_model_len {engine.max_model_len}, quantization {engine.quantization}",
        "prompt": f"max_tokens {prompt_config.max_tokens}, overlong {prompt_config.overlong}",
        "sampling": f"n {prompts[0].num_samples}, {describe_sampling(prompts[0].sampling)}",
        "agents": _digest(config.rollout.agents),
        "rewards": _digest(config.rollout.reward) if scored else "",
    }


def describe_sampling(sampling: Sampling) -> str:
    """The usual parameters, and all others that do not have their defaults."""
    usual = ("temperature", "top_p", "max_tokens", "seed")
    others = [one for one in fields(sampling) if one.name not in usual and getattr(sampling, one.name) != one.default]
    return (
        f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, max_tokens {sampling.max_tokens}, "
        f"seed {sampling.seed}" + "".join(f", {one.name} {getattr(sampling, one.name)}" for one in others)
    )


def _digest(config: BaseModel) -> str:
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]


# ── scoring a file: rows are read, scored and written one batch at a time ──

BATCH_ROWS = 256
VERL_COLUMNS = ColumnsConfig()
SCORES = pa.field("scores", pa.list_(pa.float64()))
PARTS = pa.field("score_parts", pa.list_(pa.map_(pa.string(), pa.float64())))

Row = dict[str, Any]


class ScoredFile:
    """A copy of a file with the scores of its responses. `output` appears only once every row is scored."""

    def __init__(self, path: Path, output: Path, response_column: str, config: RunConfig) -> None:
        self.path = path
        self.output = output
        self.response_column = response_column
        self.columns = config.dataset.columns
        self.data_source = data_source_of(config.dataset)
        self.metrics = RolloutMetrics(CollectorRegistry())
        self.scorer = Scorer(config.rollout.reward, self.metrics)
        self._scored: list[PromptSamples] = []

    async def write(self) -> None:
        try:
            with self._opened() as file, written_whole(self.output) as partial:
                partial.touch()
                await self.scorer.check()
                await self._score_file(file, partial)
        except OSError as error:
            why = f"cannot be written ({error.strerror or error}); give --output"
            raise InvalidInput(str(self.output), why) from error
        finally:
            await self.scorer.close()

    def summaries(self, pass_score: float, part: str) -> dict[str, ScoreSummary]:
        """By data source. pass@k counts the part of the reward, or the reward if that is empty."""
        found = {name: summarise(scored, pass_score, part) for name, scored in by_source(self._scored).items()}
        names = sorted({name for summary in found.values() for name in summary.parts})
        if part and part not in names:
            raise InvalidInput("--score", f"no reward has a part {part!r}; the parts are {', '.join(names) or 'none'}")
        return found

    def num_errors(self) -> dict[str, int]:
        [metric] = self.metrics.reward_errors.collect()
        return {s.labels["kind"]: int(s.value) for s in metric.samples if s.name.endswith("_total") and s.value}

    def _opened(self) -> pq.ParquetFile:
        if not self.path.is_file():
            raise InvalidInput(str(self.path), "is not a file; check the path")
        with reading_parquet(self.path):
            file = pq.ParquetFile(self.path)
        names = file.schema_arrow.names
        if self.response_column not in names:
            why = f"has no column `{self.response_column}`, only {', '.join(names)}; give --response-column"
            raise InvalidInput(str(self.path), why)
        return file

    def _batches(self, file: pq.ParquetFile) -> Iterator[tuple[Any, list[Row]]]:
        with reading_parquet(self.path):
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                yield batch, batch.to_pylist()

    async def _score_file(self, file: pq.ParquetFile, partial: Path) -> None:
        kept = [field for field in file.schema_arrow if field.name not in (SCORES.name, PARTS.name)]
        schema = pa.schema([*kept, SCORES, PARTS])
        with pq.ParquetWriter(partial, schema) as writer, progress_bar("scoring") as progress:
            task = progress.add_task("", total=file.metadata.num_rows)
            numbers = itertools.count()
            for batch, rows in self._batches(file):
                scoring = (self._score_row(f"{self.path} row {next(numbers)}", row) for row in rows)
                results = await asyncio.gather(*scoring)
                scores = [[score.reward for score in result] for result in results]
                parts = [[list(score.parts.items()) for score in result] for result in results]
                arrays = [batch.column(field.name) for field in kept]
                arrays += [pa.array(scores, SCORES.type), pa.array(parts, PARTS.type)]
                writer.write_batch(pa.record_batch(arrays, schema=schema))
                progress.advance(task, len(results))

    def _column(self, row: Row, name: str) -> str:
        """The column that the config names, or verl's where the file lacks it: `penstock generate` writes verl's."""
        named: str = getattr(self.columns, name)
        return named if named.partition(".")[0] in row else str(getattr(VERL_COLUMNS, name))

    async def _score_row(self, where: str, row: Row) -> list[SampleScore]:
        responses = row[self.response_column]
        responses = [responses] if isinstance(responses, str) else responses
        if not isinstance(responses, list) or not all(isinstance(response, str) for response in responses):
            raise InvalidInput(f"{where}: {self.response_column}", "must be text, or a list of texts")
        data_source: str = row_field(where, row, self._column(row, "data_source"), str, "") or self.data_source
        ground_truth = nested_field(where, row, self._column(row, "ground_truth"))
        extra_info: Row = row_field(where, row, self._column(row, "extra_info"), dict, {})
        results = await self.scorer.score(where, data_source, responses, ground_truth, extra_info)
        rewards, parts = tuple(score.reward for score in results), parts_by_name([score.parts for score in results])
        self._scored.append(PromptSamples(data_source, rewards, parts=parts))
        return results
