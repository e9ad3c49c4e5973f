"""Checkpoints of a supervised fine-tuning, in the learner's own form: `penstock export` reads them too.

`sft.json` of a checkpoint holds the fingerprint of the data, so that a training is never continued with other rows or
another order. Every rank writes its shards, then rank 0 makes the checkpoint durable. Training waits meanwhile.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch.distributed as dist

from penstock.config.learner import CheckpointConfig
from penstock.errors import CheckpointDamaged, ConfigError
from penstock_learner.checkpoint_files import FileRecord
from penstock_learner.checkpoints.store import CheckpointStore, verify_in_this_process
from penstock_learner.checkpoints.trainer_state import TrainerState, read_state
from penstock_tools.sft.rank import SupervisedRank

logger = logging.getLogger(__name__)
DATA_FILE = "sft.json"
STORE_ID = "sft"
"""Stands where a learner's checkpoint names its Redis, so that no learner takes it for one of its own."""


class SupervisedCheckpoints:
    """The checkpoints of one output folder. All methods are collective."""

    def __init__(self, folder: Path, config: CheckpointConfig, rank: SupervisedRank, fingerprint: str) -> None:
        self.store = CheckpointStore(folder, config.keep)
        self.config = config
        self.rank = rank
        self.fingerprint = fingerprint
        self.term = 0

    def restore(self) -> int:
        """Load the newest intact checkpoint that `learner.checkpoint.resume` allows. Returns its step, or 0."""
        found: list[tuple[Path | None, int]] = [(None, 0)]
        if self.rank.rank == 0:
            found[0] = (self._newest_intact(), self.store.newest_term())
        dist.broadcast_object_list(found)
        path, term = found[0]
        self.term = term if self.config.resume == "auto" else term + 1
        if path is None:
            return 0
        self._require_same_data(path)
        self.rank.restore(path)
        step = read_state(path).step
        logger.info("continuing after step %d, from %s", step, path)
        return step

    def save(self, step: int) -> Path:
        """Write a checkpoint. It is durable when this returns. The path is right on every rank."""
        partial = self.store.partial_path(step, self.term)
        if self.rank.rank == 0:
            self.store.partial_folder(step, self.term)
            (partial / DATA_FILE).write_text(json.dumps({"fingerprint": self.fingerprint}))
        dist.barrier()
        with self.store.writing(partial):
            self.rank.stage(partial)
            records = self.rank.finish_saving()
        of_ranks: list[dict[str, FileRecord]] = [{}] * self.rank.world_size
        dist.all_gather_object(of_ranks, records)
        if self.rank.rank == 0:
            shards = {name: record for files in of_ranks for name, record in files.items()}
            resumed_from = "" if self.config.resume in ("auto", "off") else self.config.resume
            state = TrainerState(step, step, self.term, store_id=STORE_ID, resumed_from=resumed_from)
            self.store.finish(partial, state, shards)
        dist.barrier()
        return partial.with_suffix("")

    def _newest_intact(self) -> Path | None:
        candidates = self.store.candidates(self.config.resume)
        for path in candidates:
            try:
                verify_in_this_process(path)
                return path
            except CheckpointDamaged as error:
                logger.warning("checkpoint %s is skipped: %s", path.name, error)
        if candidates:
            raise CheckpointDamaged(
                f"{self.store.folder} has no intact checkpoint; set learner.checkpoint.resume to off to start again"
            )
        return None

    def _require_same_data(self, path: Path) -> None:
        try:
            stored = json.loads((path / DATA_FILE).read_text())["fingerprint"]
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path} is not a checkpoint of penstock sft; name another --out, or another learner.checkpoint.resume"
            ) from error
        if stored != self.fingerprint:
            raise ConfigError(
                f"{path} was trained with other rows, masks, order or batch size; give the same data, seed and "
                "sft settings, or name another --out, or set learner.checkpoint.resume to off"
            )
