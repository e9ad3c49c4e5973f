"""Supervised fine-tuning with the learner's own packed FSDP2 model, without Ray: each process is a rank.

`penstock sft` runs one rank. `torchrun --nproc-per-node N -m penstock.cli.main sft …` runs N, which share the batches.
Model, optimizer, schedule, precision, adapter, checkpoints and loggers come from the run's config.

The rows of a step follow from the seed and the number of the step alone. So a training that is continued from a
checkpoint takes exactly the steps that it would have taken, and ends with the same weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, but not listed

from penstock.config.learner import SftConfig
from penstock.config.run import RunConfig
from penstock.errors import CheckpointDamaged, ConfigError, InvalidInput, TrainingDiverged
from penstock.feed.dataset_feed import EpochOrder, require_drawn
from penstock.feed.datasets import shown_files
from penstock_learner.algorithms.aggregation import apply_mask
from penstock_learner.batches.partition import partition
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.checkpoints import CheckpointStore, FileRecord, first_intact, read_state
from penstock_learner.loggers.step_loggers import StepLoggers, check_loggers, open_loggers
from penstock_learner.model.attention.packed_layout import ModelInputs, to_device
from penstock_learner.model.self_check import require_right
from penstock_learner.model.torch_settings import compute_dtype_of, set_up_torch
from penstock_learner.optim.optimizer import apply_gradients
from penstock_learner.roles.policy import open_policy
from penstock_learner.roles.trainer import TrainerRank
from penstock_learner.term import TrainerState
from penstock_tools.export import export
from penstock_tools.sft.data import ExampleReader, Examples, Row, batch_of_examples

logger = logging.getLogger(__name__)
DATA_FILE = "sft.json"
STORE_ID = "sft"
"""Stands where a learner's checkpoint names its Redis, so that no learner takes it for one of its own."""

# ── one process: its part of the model, an optimizer step, and the loss of held-out rows ──


class SupervisedRank(TrainerRank):
    """Minimises the cross-entropy, averaged over the trained tokens of the whole batch."""

    role = "policy"

    def __init__(self, config: RunConfig) -> None:
        """Join torchrun's process group, or make one with this process alone."""
        learner = config.learner
        set_up_torch(learner.threads_per_rank, compiles=learner.compile)
        torch.manual_seed(config.seed)
        use_gpu = torch.cuda.is_available()
        timeout = timedelta(seconds=learner.rank_timeout_s)
        backend = "cpu:gloo,cuda:nccl" if use_gpu else "gloo"
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        super().__init__(config, dist.get_rank(), dist.get_world_size())
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_gpu else torch.device("cpu")
        if use_gpu:
            torch.cuda.set_device(self.device)
        self.num_sharing = learner.sequence_parallel
        """Ranks that share each sequence. All of them see its whole loss."""
        self.num_skipped = 0
        """Steps in a row that were skipped, because a number was not finite."""

    def load(self) -> None:
        """Open the model, with an adapter if the config has one, and give it an optimizer. Collective."""
        self.model = open_policy(self.config)
        # The optimizer comes before the first forward pass, in which FSDP replaces the parameters for a while.
        self.prepare(self.model, self.config.learner.lr)
        require_right(self.model, "model.path", self.device, compute_dtype_of(self.config), self.parallel)

    def step(self, batch: SequenceBatch, num_done: int) -> dict[str, float]:
        """Take one optimizer step after `num_done` others. Every rank gets the whole batch, trains its part and gives
        the same numbers. The loss is averaged over the trained tokens of the batch."""
        learner = self.config.learner
        self.optimizer.zero_grad(set_to_none=True)
        num_trained = int(batch.loss_mask.sum())
        total = torch.zeros((), device=self.device)
        for micro in self._part(batch):
            loss = self._loss_sum(micro) / num_trained
            total += loss.detach()
            loss = loss + self._balance_loss(micro, num_trained)
            # FSDP averages gradients over ranks. The count of tokens is global, so the sum is needed.
            (loss * self.world_size).backward()
        taken = apply_gradients(self.model, self.optimizer, learner, num_done, lr=learner.lr, losses=total)
        self.num_skipped = self.num_skipped + 1 if taken.skipped else 0
        if self.num_skipped and self.num_skipped == learner.max_skipped_steps:
            raise TrainingDiverged(
                f"loss or gradient was not finite at step {num_done + 1} ({self.num_skipped} such steps in a row); "
                "lower learner.lr, or look at the data"
            )
        dist.all_reduce(total)
        return {
            "train/loss": float(total) / self.num_sharing, "train/lr": taken.lr, "train/grad_norm": taken.grad_norm,
            "train/trained_tokens": num_trained,
        }  # fmt: skip

    @torch.no_grad()
    def mean_loss(self, batches: Iterable[SequenceBatch]) -> float:
        """The loss of all batches, averaged over their trained tokens. Collective. Nothing is trained."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            for micro in self._part(batch):
                sums += torch.stack([self._loss_sum(micro).double(), sums.new_tensor(micro.loss_mask.sum())])
        dist.all_reduce(sums)
        loss, num_trained = sums.tolist()
        return float(loss / num_trained)

    def _part(self, batch: SequenceBatch) -> list[SequenceBatch]:
        """The micro-batches of this rank, which are those of all ranks that share its sequences."""
        budget = self.config.learner.micro_batch_tokens * self.num_sharing
        shards = partition(batch, self.world_size // self.num_sharing, budget)
        return shards[self.rank // self.num_sharing].micro_batches

    def _loss_sum(self, micro: SequenceBatch) -> Tensor:
        log_probs, _ = self.model(ModelInputs.of(micro, self.device, self.parallel))
        return -apply_mask(log_probs, to_device(micro.loss_mask, self.device).bool()).sum()

    def _balance_loss(self, micro: SequenceBatch, num_trained: int) -> Tensor | float:
        coefficient = self.config.learner.router.aux_loss_coefficient
        balance = self.model.watch.balance() if coefficient and self.model.watch is not None else None
        if balance is None:
            return 0.0
        # Ranks that share sequences compute the loss of their own tokens. Its mean over them counts.
        return coefficient / self.num_sharing * int(micro.loss_mask.sum()) / num_trained * balance.loss


# ── the training ──


@dataclass(frozen=True)
class Stopped:
    """A training that was told to stop. It continues from its checkpoint."""

    step: int
    checkpoint: Path


def fine_tune(config: RunConfig, out: Path) -> Stopped | None:
    """Train on the rows of `sft.file` and write the model, or its adapter, to the folder `out`.

    Checkpoints and metrics are in `OUT.training`, which stays."""
    check_loggers(config.learner.loggers)
    plan = make_plan(config)
    learner = config.learner.model_copy(update={"num_steps": plan.num_steps, "ray_address": ""})
    config = config.model_copy(update={"learner": learner})
    rank = SupervisedRank(config)
    try:
        if rank.rank == 0:
            logger.info("training: %s", plan)
        with noted_signals() as signals:
            outcome = SupervisedTraining(config, plan, rank, out).run(signals)
    finally:
        dist.destroy_process_group()
    if isinstance(outcome, Stopped):
        return outcome
    if rank.rank == 0:
        is_adapter = learner.lora is not None and config.sft.output == "adapter"
        del rank
        export(config, outcome, out, config.model.dtype, adapter=is_adapter)
    return None


@dataclass(frozen=True)
class Plan:
    """The rows, and which of them each step trains."""

    sft: SftConfig
    training: Examples
    held_out: Examples | None
    order: EpochOrder

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.order.num_rows, self.sft.batch_size)
        return whole + (rest > 0 and self.sft.last_batch == "train")

    @property
    def num_steps(self) -> int:
        return self.sft.epochs * self.steps_per_epoch

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides which rows a step trains."""
        order = (self.order.shuffle, self.order.seed, self.sft.batch_size, self.sft.last_batch)
        return hashlib.sha256(repr((self.training.fingerprint, order)).encode()).hexdigest()

    def batch(self, step: int) -> SequenceBatch:
        """The batch of a step. The first step is 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.sft.batch_size
        chosen = self.order.rows(epoch)[first : first + self.sft.batch_size]
        return _batch([self.training.rows[index] for index in chosen.tolist()])

    def __str__(self) -> str:
        held_out = "" if self.held_out is None else f" Held out: {self.held_out}."
        return f"{self.training}. {self.num_steps} steps in {self.sft.epochs} epochs.{held_out}"


def make_plan(config: RunConfig) -> Plan:
    """Read the files. Raises ConfigError or InvalidInput if they cannot be trained on as the config says."""
    from transformers import AutoConfig, AutoTokenizer

    sft = config.sft
    if sft.file is None:
        raise ConfigError("there is no data to train on; give --data, or set sft.file")
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(f"model.path {config.model.path} is not a model folder (no config.json)")
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    described = AutoConfig.from_pretrained(config.model.path, local_files_only=True).get_text_config()
    reader = ExampleReader(config, tokenizer, getattr(described, "max_position_embeddings", None))
    training = reader.read(sft.file)
    held_out = None if sft.validation.file is None else reader.read(sft.validation.file)
    require_drawn(training.parts, shown_files(sft.file))
    order = EpochOrder(training.parts, shuffle=sft.shuffle, seed=config.seed % 2**32)
    plan = Plan(sft, training, held_out, order)
    learner, files = config.learner, shown_files(sft.file)
    if plan.num_steps == 0:
        raise InvalidInput(
            files,
            f"has {order.num_rows} rows, less than one batch of {sft.batch_size}; lower --batch-size, or set "
            "sft.last_batch to train",
        )
    if learner.warmup_steps >= plan.num_steps and learner.lr_schedule != "constant":
        raise ConfigError(
            f"{files} gives {plan.num_steps} steps, which are not more than learner.warmup_steps "
            f"({learner.warmup_steps}); lower it, raise --epochs, or set learner.lr_schedule to constant"
        )
    return plan


class SupervisedTraining:
    """The loop of steps, validations and checkpoints of one rank.

    Checkpoints have the learner's own form, which `penstock export` reads too. Every rank writes its shards, then rank
    0 makes the checkpoint durable; training waits for it. Its `sft.json` holds the fingerprint of the data, so that a
    training is never continued with other rows or another order."""

    def __init__(self, config: RunConfig, plan: Plan, rank: SupervisedRank, out: Path) -> None:
        self.config = config
        self.plan = plan
        self.rank = rank
        self.folder = out.with_name(f"{out.name}.training")
        self.store = CheckpointStore(self.folder / "checkpoints", config.learner.checkpoint.keep)
        self.resume = config.learner.checkpoint.resume
        self.term = 0

    def run(self, signals: Sequence[int]) -> Path | Stopped:
        """Train to the last step, or until `signals` has one. Returns the last checkpoint, which is written first."""
        self.rank.load()
        done = self._restore()
        loggers: StepLoggers | None = None
        if self.rank.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            place = {"run_dir": self.folder.parent, "run": self.folder.name}
            loggers = open_loggers(self.config.model_copy(update=place), done)
        with contextlib.closing(loggers) if loggers is not None else contextlib.nullcontext():
            return self._run(done, signals, loggers)

    def _run(self, done: int, signals: Sequence[int], loggers: StepLoggers | None) -> Path | Stopped:
        checkpoint, num_steps, held_out = None, self.plan.num_steps, self.plan.held_out
        if done == 0 and self.plan.sft.validation.before_train and held_out is not None:
            self._log(loggers, {"step": 0, "val/loss": self._validate(held_out)})
        while done < num_steps:
            started = time.monotonic()
            report = self.rank.step(self.plan.batch(done), done)
            done += 1
            epoch, seconds = done / self.plan.steps_per_epoch, time.monotonic() - started
            numbers = {"step": done, "epoch": epoch, **report, "timing_s/step": seconds}
            if self._is_due(self.plan.sft.validation.every_steps, done) and held_out is not None:
                numbers["val/loss"] = self._validate(held_out)
            self._log(loggers, numbers)
            num_signals = torch.tensor(len(signals))
            dist.all_reduce(num_signals)  # a rank that got none stops too
            is_told = num_signals.item() > 0
            if is_told or self._is_due(self.config.learner.checkpoint.every_steps, done):
                checkpoint = self._save(done)
            if is_told and done < num_steps:
                assert checkpoint is not None
                return Stopped(done, checkpoint)
        return checkpoint or self._save(done)

    def _is_due(self, every_steps: int, done: int) -> bool:
        return done % every_steps == 0 or done == self.plan.num_steps

    def _validate(self, held_out: Examples) -> float:
        rows, size = held_out.rows, self.plan.sft.batch_size
        return self.rank.mean_loss(_batch(rows[first : first + size]) for first in range(0, len(rows), size))

    def _log(self, loggers: StepLoggers | None, numbers: dict[str, float]) -> None:
        if loggers is None:
            return
        loggers.log({**numbers, "time": time.time()})
        shown = "  ".join(f"{name} {numbers[name]:.4f}" for name in ("train/loss", "val/loss") if name in numbers)
        logger.info("step %d of %d  %s", numbers["step"], self.plan.num_steps, shown)

    def _restore(self) -> int:
        """Load the newest intact checkpoint that `learner.checkpoint.resume` allows. Returns its step, or 0."""
        found: list[tuple[Path | None, int]] = [(None, 0)]
        if self.rank.rank == 0:
            newest, damaged = first_intact(self.store.candidates(self.resume))
            found[0] = (newest, self.store.newest_term())
            for damage in damaged:
                logger.warning("checkpoint %s is skipped", damage)
            if damaged and newest is None:
                raise CheckpointDamaged(
                    f"{self.store.folder} has no intact checkpoint; set learner.checkpoint.resume to off to start again"
                )
        dist.broadcast_object_list(found)
        path, term = found[0]
        self.term = term if self.resume == "auto" else term + 1
        if path is None:
            return 0
        self._require_same_data(path)
        self.rank.load_checkpoint(path)
        step = read_state(path).step
        logger.info("continuing after step %d, from %s", step, path)
        return step

    def _save(self, step: int) -> Path:
        """Write a checkpoint. It is durable when this returns. The path is right on every rank."""
        partial = self.store.partial_path(step, self.term)
        if self.rank.rank == 0:
            self.store.partial_folder(step, self.term)
            (partial / DATA_FILE).write_text(json.dumps({"fingerprint": self.plan.fingerprint}))
        dist.barrier()
        with self.store.writing(partial):
            self.rank.stage(partial)
            records = self.rank.finish_saving()
        of_ranks: list[dict[str, FileRecord]] = [{}] * self.rank.world_size
        dist.all_gather_object(of_ranks, records)
        if self.rank.rank == 0:
            shards = {name: record for files in of_ranks for name, record in files.items()}
            resumed_from = "" if self.resume in ("auto", "off") else self.resume
            state = TrainerState(step, step, self.term, store_id=STORE_ID, resumed_from=resumed_from)
            self.store.finish(partial, state, shards)
        dist.barrier()
        return partial.with_suffix("")

    def _require_same_data(self, path: Path) -> None:
        try:
            stored = json.loads((path / DATA_FILE).read_text())["fingerprint"]
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path} is not a checkpoint of penstock sft; name another --out, or another learner.checkpoint.resume"
            ) from error
        if stored != self.plan.fingerprint:
            raise ConfigError(
                f"{path} was trained with other rows, masks, order or batch size; give the same data, seed and "
                "sft settings, or name another --out, or set learner.checkpoint.resume to off"
            )


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """The list gets a SIGTERM or SIGINT that comes within the block. A second one has its usual effect."""
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        signal.signal(number, before[number])
        logger.warning("signal %d: a checkpoint is written after this step, and the training ends", number)

    before = {int(number): signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _batch(rows: Sequence[Row]) -> SequenceBatch:
    return batch_of_examples([example for row in rows for example in row])
