"""One of four processes whose ranks share sequences, without Ray: `python -m support.sharing_rank RANK FOLDER`.

For 4, 2 and 1 ranks and every model in the folder, all roles compute a batch. All ranks share its sequences. Rank 0
writes what each role returns, and the gradients of those that are trained, as `MODEL-RANKS.safetensors`, with shared
prefixes also as `MODEL-RANKS-shared.safetensors`. `checks.json` has what the self-check says of ranks that got wrong
heads. With `types` as a third argument, two ranks compare every type of model instead, and write `types.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock_learner.batches.sequence_batch import SequenceBatch, batch_of
from penstock_learner.model.architectures import path_of, prefix_sharing_roles, require_parallel
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.attention.sequence_parallel import SequenceParallel, make_sequence_parallel
from penstock_learner.model.causal_lm import load_model
from penstock_learner.model.published_layout import full_weight
from penstock_learner.model.torch_settings import set_up_torch
from penstock_learner.roles import critic, frozen, policy
from penstock_learner.roles.role_group import worker_of
from penstock_learner.steps.program import denominators_of, with_advantages
from penstock_learner.steps.roles import RoleAccess
from support.groups import make_group
from support.learner_ranks import make_rank, with_model
from support.tiny_architectures import ARCHITECTURES, COMPOSITES, random_batch, tiny_config, tiny_model

CPU = torch.device("cpu")
SIZES = (4, 2, 1)
SHARING_PREFIXES = ("policy", "reference", "critic")
ROLES = (*SHARING_PREFIXES, "reward_model", "judge")


def config_of(folder: Path, num_ranks: int, *, shared: bool) -> RunConfig:
    sharing = {"num_ranks": num_ranks, "sequence_parallel": num_ranks}
    scalar = sharing | {"path": str(folder / "scalar")}
    learner = {
        "policy": {"num_ranks": num_ranks},
        "sequence_parallel": num_ranks,
        "reference": sharing,
        "critic": scalar,
        "reward_model": scalar,
        "roles": {"judge": sharing | {"worker": "reward_model", "path": str(folder / "causal"),
                                      "judge": {"question": "w9 w11", "yes": "w5", "no": "w7"}}},
        "step": "a:step",
        "share_prefixes": shared,
        "micro_batch_tokens": (100 if shared else 200) // num_ranks,  # two micro-batches
        "logprob_chunk_tokens": 16,
        "algorithm": {"advantage": {"name": "gae"}, "correction": {"mode": "bypass"}, "kl": {"placement": "loss"}},
    }  # fmt: skip
    return validate(with_model({"learner": learner}, folder / "causal"), "test")


def some_batch(config: RunConfig) -> SequenceBatch:
    """Twelve sequences of three prompts of twenty tokens, with what the passes of an update need."""
    prompt, random = np.random.default_rng(5).integers(2, 60, 20).astype(np.int32), np.random.default_rng(0)
    groups = [make_group(prompt_id) for prompt_id in (1, 2, 3)]
    batch = batch_of([replace(group, prompt_token_ids=prompt + group.prompt_id) for group in groups])
    near = (batch.behaviour_log_probs + 0.1 * random.normal(size=len(batch.loss_mask))).astype(np.float32)
    values = random.normal(size=len(near)).astype(np.float32)
    batch = replace(batch, reference_log_probs=near, values=values)
    return with_advantages(batch, config.learner.algorithm, 0.0)


def compute(folder: Path, *, shared: bool) -> dict[str, Tensor]:
    """What every role makes of the batch, on all ranks together. Results of a shard are in its own order."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    config = config_of(folder, num_ranks, shared=shared)
    batch = some_batch(config)
    access: Any = RoleAccess(config.learner, None, frozenset(), prefix_sharing_roles(config))  # type: ignore[arg-type]
    found: dict[str, Tensor] = {}
    for name in SHARING_PREFIXES if shared else ROLES:
        role: Any = make_rank(worker_of(config.learner, name), config, name)
        (shard,), num_sharing = access.shards(name, num_ranks, batch)
        assert num_sharing == num_ranks and len(shard.micro_batches) >= 2
        assert shard.shares_prefixes == shared
        order = np.argsort(np.concatenate(shard.sequences), kind="stable")
        method = {"policy": "log_probs", "reference": "log_probs", "critic": "values"}.get(name, "scores")
        result = getattr(role, method)(shard)
        if method != "scores":
            sizes = np.concatenate([micro.response_lengths for micro in shard.micro_batches])
            parts = np.split(result, np.cumsum(sizes)[:-1])
            found[name] = torch.from_numpy(np.concatenate([parts[index] for index in order]))
        else:
            found[name] = torch.from_numpy(result[order])
        if name in ("policy", "critic"):
            algorithm = config.learner.algorithm
            loss = algorithm.loss if name == "policy" else algorithm.value_loss
            role.run_passes(shard, denominators_of(batch, loss))
            for parameter, weight in role.model.named_parameters():
                if weight.grad is not None:
                    found[f"{name}: {parameter}"] = full_weight(weight.grad).clone()
        assert_same_everywhere(found, rank)
    return found


def assert_same_everywhere(found: dict[str, Tensor], rank: int) -> None:
    """All ranks of a group return the same."""
    own = torch.cat([each.flatten() for each in found.values()])
    other = own.clone()
    dist.broadcast(other, src=0)
    assert torch.equal(own, other), rank


def check_wrong_heads(folder: Path) -> str:
    """What the start says if key heads are repeated in the wrong order."""
    right = SequenceParallel._spread

    def wrong(self: SequenceParallel, states: Tensor) -> Tensor:
        return states.repeat(1, right(self, states).shape[1] // states.shape[1], 1)

    SequenceParallel._spread = wrong  # type: ignore[method-assign]
    try:
        compute(folder, shared=False)
    except ConfigError as error:
        return str(error)
    finally:
        SequenceParallel._spread = right  # type: ignore[method-assign]
    return ""


def compare_types(folder: Path) -> dict[str, str]:
    """For every type of model that ranks may share sequences of: how its log-probs or gradients differ, if they do."""
    parallel, found = make_sequence_parallel(dist.get_world_size()), {}
    assert parallel is not None
    for name in sorted({*ARCHITECTURES, *COMPOSITES}):
        config = tiny_config(name)
        path = folder / name
        try:
            require_parallel(config, path_of(config), parallel.size)
            if parallel.rank == 0:
                tiny_model(name).save_pretrained(path)
            dist.barrier()
            model = load_model(path, torch.float32, 16)
            require_parallel(model.lm.config, model.path, parallel.size)
        except ConfigError as error:
            found[name] = f"refused: {error}"
            continue
        alone, own = (_log_probs_and_gradients(model, each) for each in (None, parallel))
        for gradient in own[1:]:
            dist.all_reduce(gradient)
        found[name] = "" if all(map(_are_close, own, alone)) else str(list(map(_distance, own, alone)))
    return found


def _log_probs_and_gradients(model: Any, parallel: SequenceParallel | None) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    log_probs, _ = model(ModelInputs.of(random_batch(), CPU, parallel))
    (log_probs * torch.randn(len(log_probs), generator=torch.Generator().manual_seed(1))).sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [log_probs.detach(), *gradients]


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


def _are_close(found: Tensor, expected: Tensor) -> bool:
    return _distance(found, expected) < 1e-3


def in_group(rank: int, size: int, folder: Path, work: Callable[[], None]) -> None:
    if rank >= size:
        return
    store = dist.FileStore(str(folder / f"store-{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=240))
    work()
    dist.destroy_process_group()


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    set_up_torch(1, compiles=False)

    def write_types() -> None:
        found = compare_types(folder)
        if rank == 0:
            (folder / "types.json").write_text(json.dumps(found))

    def write_all() -> None:
        if dist.get_world_size() == SIZES[0]:
            said = check_wrong_heads(folder / "2-of-8")
            if rank == 0:
                (folder / "checks.json").write_text(json.dumps(said))
        for module in (policy, frozen, critic):  # the checks of the start would take most of the time
            module.require_right = lambda *_: None  # type: ignore[attr-defined]
        for model in sorted(path for path in folder.iterdir() if path.is_dir()):
            for shared in (False, True) if dist.get_world_size() > 1 else (False,):
                found = compute(model, shared=shared)
                name = f"{model.name}-{dist.get_world_size()}{'-shared' * shared}"
                if rank == 0:
                    save_file({key: each.contiguous() for key, each in found.items()}, folder / f"{name}.safetensors")

    if "types" in sys.argv:
        in_group(rank, 2, folder, write_types)
    else:
        for size in SIZES:
            in_group(rank, size, folder, write_all)


if __name__ == "__main__":
    main()
