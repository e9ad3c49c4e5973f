"""Scores a Parquet file of responses. Rows are read, scored and written one batch at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from prometheus_client import CollectorRegistry

from penstock.cli.output import progress_bar
from penstock.config.rollout import RewardConfig
from penstock.errors import InvalidInput
from penstock.feed.datasets import row_field
from penstock.sample_scores import ScoreSummary, summarise
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.function import SampleScore
from penstock_rollout.rewards.scorer import Scorer

BATCH_ROWS = 256
SCORES = pa.field("scores", pa.list_(pa.float64()))
PARTS = pa.field("score_parts", pa.list_(pa.map_(pa.string(), pa.float64())))

Row = dict[str, Any]


class ScoringRun:
    """One pass over a file. `output` appears only once every row is scored."""

    def __init__(self, path: Path, output: Path, response_column: str, config: RewardConfig) -> None:
        self.path = path
        self.output = output
        self.response_column = response_column
        self.metrics = RolloutMetrics(CollectorRegistry())
        self.scorer = Scorer(config, self.metrics)
        self._scores: dict[str, list[list[float]]] = defaultdict(list)

    async def run(self) -> None:
        partial = self.output.with_suffix(self.output.suffix + ".partial")
        try:
            with self._open() as file:
                self._check_output(partial)
                await self.scorer.check()
                await self._score_file(file, partial)
            partial.replace(self.output)
        finally:
            if self.output.parent.is_dir():
                partial.unlink(missing_ok=True)
            await self.scorer.close()

    def summaries(self, pass_score: float) -> dict[str, ScoreSummary]:
        return {name: summarise(scores, pass_score) for name, scores in sorted(self._scores.items())}

    def num_errors(self) -> dict[str, int]:
        [metric] = self.metrics.reward_errors.collect()
        return {s.labels["kind"]: int(s.value) for s in metric.samples if s.name.endswith("_total") and s.value}

    def _check_output(self, partial: Path) -> None:
        try:
            partial.touch()
        except OSError as error:
            raise InvalidInput(str(self.output), f"cannot be written ({error.strerror}); give --output") from error

    @contextlib.contextmanager
    def _open(self) -> Iterator[pq.ParquetFile]:
        if not self.path.is_file():
            raise InvalidInput(str(self.path), "is not a file; check the path")
        try:
            with pq.ParquetFile(self.path) as file:
                names = file.schema_arrow.names
                if self.response_column not in names:
                    raise InvalidInput(
                        str(self.path),
                        f"has no column `{self.response_column}`, only {', '.join(names)}; give --response-column",
                    )
                yield file
        except (pa.ArrowException, OSError) as error:
            raise InvalidInput(str(self.path), f"cannot be read as Parquet ({' '.join(str(error).split())})") from error

    async def _score_file(self, file: pq.ParquetFile, partial: Path) -> None:
        kept = [field for field in file.schema_arrow if field.name not in (SCORES.name, PARTS.name)]
        schema = pa.schema([*kept, SCORES, PARTS])
        with pq.ParquetWriter(partial, schema) as writer, progress_bar("scoring") as progress:
            task = progress.add_task("", total=file.metadata.num_rows)
            start = 0
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                rows = batch.to_pylist()
                results = await asyncio.gather(
                    *(self._score_row(f"{self.path} row {start + index}", row) for index, row in enumerate(rows))
                )
                scores = [[score.reward for score in result] for result in results]
                parts = [[list(score.parts.items()) for score in result] for result in results]
                arrays = [batch.column(field.name) for field in kept]
                arrays += [pa.array(scores, SCORES.type), pa.array(parts, PARTS.type)]
                writer.write_batch(pa.record_batch(arrays, schema=schema))
                start += len(rows)
                progress.advance(task, len(rows))

    async def _score_row(self, where: str, row: Row) -> list[SampleScore]:
        responses = row[self.response_column]
        responses = [responses] if isinstance(responses, str) else responses
        if not isinstance(responses, list) or not all(isinstance(response, str) for response in responses):
            raise InvalidInput(f"{where}: {self.response_column}", "must be text, or a list of texts")
        data_source: str = row_field(where, row, "data_source", str, "")
        ground_truth = row_field(where, row, "reward_model", dict, {}).get("ground_truth")
        extra_info: Row = row_field(where, row, "extra_info", dict, {})
        results = await self.scorer.score(where, data_source, responses, ground_truth, extra_info)
        self._scores[data_source].append([score.reward for score in results])
        return results
