"""One rank of a small training job, without Ray: `python -m support.training_rank RANK RANKS FOLDER`. One step a case.

It reads `model/` and `cases.json` in the folder, which has the learner's settings for each case. For each case rank 0
writes the gradient as safetensors, and the loss, the gradient norm and the log-probs as JSON. The case `loaded` loads
the models in `loaded/` instead, and writes which weights are wrong.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from penstock.config.learner import LearnerConfig, LoraConfig
from penstock.config.loading import validate
from penstock_learner.batches.partition import partition, unpermute
from penstock_learner.batches.sequence_batch import SequenceBatch, batch_of
from penstock_learner.model.adapter import add_adapter
from penstock_learner.model.attention.sequence_parallel import make_sequence_parallel
from penstock_learner.model.causal_lm import CausalLM, open_model
from penstock_learner.model.loading import TensorFiles, prepare_for_training, read_weights
from penstock_learner.model.published_layout import full_weight
from penstock_learner.model.torch_settings import DTYPES, compute_dtype_of, set_up_torch
from penstock_learner.optim.optimizer import HostAdamW, make_optimizer
from penstock_learner.roles.policy import PolicyUpdate
from penstock_learner.roles.trainer import TrainerRank
from penstock_learner.steps.program import denominators_of, with_advantages
from support.groups import make_group

CPU = torch.device("cpu")
EXPERTS = ("q_proj", "experts.gate_up_proj", "experts.down_proj")
POISONED = 5
"""In a case called `poisoned`, the advantage of this sequence is infinite."""


def training_batch(*, with_long_prompts: bool = False) -> SequenceBatch:
    """Twelve sequences of three prompts, at two temperatures. Long prompts have twenty tokens."""
    groups = [make_group(prompt_id) for prompt_id in (1, 2, 3)]
    if with_long_prompts:
        prompt = np.random.default_rng(5).integers(2, 60, 20).astype(np.int32)
        groups = [replace(group, prompt_token_ids=prompt + group.prompt_id) for group in groups]
    batch = batch_of(groups)
    by_sequence = np.where(np.arange(12) % 2, 0.7, 1.0).astype(np.float32)
    return replace(batch, temperatures=by_sequence[batch.sequence_ids])


def take_step(rank: int, num_ranks: int, folder: Path, name: str, settings: dict[str, Any]) -> None:
    shares = "shared" in name
    has_long = shares or name == "long prompts"
    learner: dict[str, Any] = {
        "policy": {"num_ranks": num_ranks},
        "micro_batch_tokens": 60,
        "share_prefixes": shares,
        "logprob_chunk_tokens": 16,
        "max_grad_norm": 1e9,  # large, so that the gradient is not clipped
        "algorithm": {"correction": {"mode": "bypass"}, "kl": {"placement": "none"}},
        **settings,
    }
    config = validate({"model": {"path": str(folder / "model")}, "learner": learner}, "test")
    model = open_model(
        config.model.path,
        DTYPES[config.learner.master_dtype],
        config.learner.logprob_chunk_tokens,
        compiled=config.learner.compile,
    )
    prepare_for_training(model, config.learner, compute_dtype_of(config), is_cuda=False)
    read_weights(model, CPU, offload=config.learner.keeps_weights_on_host)
    share = config.learner.sequence_parallel
    parallel = make_sequence_parallel(share)
    update = PolicyUpdate(
        model, make_optimizer(model, config.learner, config.learner.lr), config.learner, CPU, parallel
    )
    batch = with_advantages(training_batch(with_long_prompts=has_long), config.learner.algorithm, 0.0)
    if name.startswith("poisoned"):
        advantages = np.array(batch.advantages)
        advantages[batch.sequence_ids == POISONED] = np.inf
        batch = replace(batch, advantages=advantages)
    before = {n: full_weight(p).detach().clone() for n, p in model.lm.named_parameters()}
    shards = partition(batch, num_ranks // share, config.learner.micro_batch_tokens * share, shares_prefixes=shares)
    assert all(shard.shares_prefixes == shares for shard in shards)
    own = shards[rank // share]
    log_probs: list[Any] = [None] * num_ranks
    dist.all_gather_object(log_probs, update.log_probs(own))
    report = update.run(own, denominators_of(batch, config.learner.algorithm.loss), 1, 0, 0.0)
    reports: list[Any] = [None] * num_ranks
    dist.all_gather_object(reports, report)
    losses = [each.loss for each in reports]
    guilty = [index for each, shard in zip(reports[::share], shards, strict=True)
              for micro in each.nonfinite for index in shard.sequences[micro]]  # fmt: skip
    changed = [not torch.equal(full_weight(p), before[n]) for n, p in model.lm.named_parameters()]
    gradient = {n: full_weight(p.grad) for n, p in model.lm.named_parameters() if p.grad is not None}
    if rank == 0:
        assert report.step is not None
        save_file({n: g.float().contiguous() for n, g in gradient.items()}, folder / f"{name}.safetensors")
        said = {
            "loss": sum(losses[::share]),
            "grad_norm": report.step.grad_norm,
            "skipped": report.step.skipped,
            "guilty": guilty,
            "changed": any(changed),
            "log_probs": unpermute(log_probs[::share], shards, batch).tolist(),
        }
        (folder / f"{name}.json").write_text(json.dumps(said))


def stage_and_restore(rank: int, num_ranks: int, folder: Path, name: str) -> None:
    """A checkpoint holds the state at the moment of staging, whatever happens to the weights while it is written."""
    trainer, model = trainer_of(rank, num_ranks, folder)
    optimize(trainer, model, 1.0)
    trainer.stage(folder / "shards")
    staged = state_of(trainer, model)
    for _ in range(3):
        trainer.optimizer.step()
    moved = not any(torch.equal(tensor, staged[n]) for n, tensor in weights_of(model).items())
    trainer.finish_saving()
    trainer.load_checkpoint(folder / "shards")
    same = all(torch.equal(tensor, staged[n]) for n, tensor in state_of(trainer, model).items())
    optimize(trainer, model, -0.5)
    after = state_of(trainer, model)
    if rank == 0:
        save_file({n: staged[n] for n, _ in model.lm.named_parameters()}, folder / f"{name}.safetensors")
        save_file(after, folder / f"{name}-after.safetensors")
        (folder / f"{name}.json").write_text(json.dumps({"moved": moved, "same": same}))


def resume(rank: int, num_ranks: int, folder: Path, name: str) -> None:
    """Continue the checkpoint of `stage_and_restore`, by another number of ranks, with the same step."""
    trainer, model = trainer_of(rank, num_ranks, folder)
    trainer.load_checkpoint(folder / "shards")
    optimize(trainer, model, -0.5)
    save_file(state_of(trainer, model), folder / f"{name}.safetensors")


def trainer_of(rank: int, num_ranks: int, folder: Path, offload: str = "none") -> tuple[TrainerRank, CausalLM]:
    learner = {"policy": {"num_ranks": num_ranks}, "offload": offload}
    config = validate({"model": {"path": str(folder / "model")}, "learner": learner}, "t")
    trainer = TrainerRank(config, rank, num_ranks)
    trainer.device = CPU
    model = open_model(config.model.path, torch.float32, 16)
    trainer.prepare(model, 1e-3)
    return trainer, model


def optimize(trainer: TrainerRank, model: CausalLM, gradient: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    trainer.optimizer.step()


def weights_of(model: CausalLM) -> dict[str, torch.Tensor]:
    return {n: full_weight(p).detach().clone().contiguous() for n, p in model.lm.named_parameters()}


def state_of(trainer: TrainerRank, model: CausalLM) -> dict[str, torch.Tensor]:
    """Weights and moments, whole."""
    return weights_of(model) | {
        f"{n}.{moment}": full_weight(trainer.optimizer.state[p][moment]).detach().clone().contiguous()
        for n, p in model.lm.named_parameters()
        for moment in ("exp_avg", "exp_avg_sq", "step")
    }


def load_across_offloads(rank: int, num_ranks: int, folder: Path, name: str) -> None:
    """Whether a checkpoint of each kind of offload continues under each: with the same weights and moments."""
    said: dict[str, bool] = {}
    trained = {each: trainer_of(rank, num_ranks, folder, each) for each in ("none", "optimizer", "weights", "all")}
    for written, (writer, its_model) in trained.items():
        checkpoint = folder / f"{name}-{written}"
        optimize(writer, its_model, 1.0)
        writer.stage(checkpoint)
        writer.finish_saving()
        optimize(writer, its_model, -0.5)
        expected = state_of(writer, its_model)
        for read, (reader, model) in trained.items():
            optimize(reader, model, 3.0)
            reader.load_checkpoint(checkpoint)
            optimize(reader, model, -0.5)
            found = state_of(reader, model)
            same = all(torch.equal(tensor, expected[n]) for n, tensor in found.items())
            said[f"{written}, {read}"] = same and isinstance(reader.optimizer, HostAdamW) == (read != "none")
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(said))


def load_models(rank: int, folder: Path, name: str) -> None:
    """Compare sharded models with whole ones, and what this rank has read with what the files hold."""
    read = 0

    def counted(self: TensorFiles, name: str, start: int, stop: int) -> Any:
        nonlocal read
        for first, rows in pieces(self, name, start, stop):
            read += rows.nbytes
            yield first, rows

    def counted_whole(self: TensorFiles, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        nonlocal read
        read += whole(self, name).nbytes
        return whole(self, name, dtype)

    pieces, TensorFiles.pieces = TensorFiles.pieces, counted  # type: ignore[method-assign]
    whole, TensorFiles.whole = TensorFiles.whole, counted_whole  # type: ignore[method-assign]
    said: dict[str, Any] = {}
    for path in sorted((folder / "loaded").iterdir()):
        for settings in ({}, {"offload": "all"}, {"lora": {"rank": 4, "alpha": 8}}):
            learner = LearnerConfig.model_validate(settings)
            model = open_model(path, torch.float32, 16)
            if learner.lora is not None:
                targets = EXPERTS if path.name == "mixtral" else "all-linear"
                add_adapter(model, LoraConfig(rank=4, alpha=8, target_modules=targets))
            prepare_for_training(model, learner, torch.float32, is_cuda=False)
            read = 0
            read_weights(model, CPU, offload=learner.keeps_weights_on_host)
            plain = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
            wrong = [
                parameter_name
                for parameter_name, parameter in model.lm.named_parameters()
                if ".lora_" not in parameter_name
                and not torch.equal(full_weight(parameter), plain[parameter_name.replace(".base_layer", "")])
            ]
            said[f"{path.name} {settings}"] = (wrong, read / sum(p.nbytes for p in plain.values()))
    (folder / f"{name}-{rank}.json").write_text(json.dumps(said))


def main() -> None:
    rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    set_up_torch(1, compiles=True)
    store = dist.FileStore(str(folder / f"store-{num_ranks}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120))
    for name, (ranks, settings) in json.loads((folder / "cases.json").read_text()).items():
        if ranks == num_ranks and name == "loaded":
            load_models(rank, folder, name)
        elif ranks == num_ranks and name == "offloads":
            load_across_offloads(rank, num_ranks, folder, name)
        elif ranks == num_ranks and name == "staged":
            stage_and_restore(rank, num_ranks, folder, name)
        elif ranks == num_ranks and name == "resumed":
            resume(rank, num_ranks, folder, name)
        elif ranks == num_ranks:
            take_step(rank, num_ranks, folder, name, settings)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
