"""One rank of a policy with experts, without Ray: `python -m support.expert_ranks RANK RANKS FOLDER DEVICE`.

It reads `model/` and `cases.json` in the folder, which has the number of ranks and the learner's settings of each case.
Rank 0 writes the results of each case: the weights that it would push before and after a step, the gradient, loss and
norm. Then the case `WRITER` writes a checkpoint, which all cases with as many ranks load. Ranks share one GPU.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from penstock.config.loading import validate
from penstock_learner.batches.partition import partition
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.model.published_layout import full_weight
from penstock_learner.model.torch_settings import set_up_torch
from penstock_learner.roles.policy import PolicyWorker
from penstock_learner.steps.program import denominators_of, with_advantages
from support.forked_process import ForkedProcess
from support.tiny_architectures import tiny_model
from support.tiny_models import write_tokenizer
from support.training_rank import training_batch

PROGRAM = "support.expert_ranks"
Cases = dict[str, tuple[int, dict[str, Any]]]
NUM_EXPERTS = 8
WRITER = "four ranks, 2 share"


def batch_with_experts(name: str, num_layers: int, per_token: int) -> SequenceBatch:
    """The batch of a step, with the experts that an engine chose: in a case called `starved`, always the first ones."""
    batch = training_batch()
    chances = np.random.default_rng(1).random((len(batch.token_ids), num_layers, NUM_EXPERTS))
    if "starved" in name:
        chances = np.broadcast_to(np.arange(NUM_EXPERTS), chances.shape)
    return replace(batch, routed_experts=chances.argsort(axis=-1)[..., :per_token].astype(np.int16))


def load(rank: int, num_ranks: int, folder: Path, device: torch.device, settings: dict[str, Any]) -> PolicyWorker:
    learner: dict[str, Any] = {
        "policy": {"num_ranks": num_ranks},
        "publish_host": "127.0.0.1",
        "micro_batch_tokens": 60,
        "share_prefixes": False,
        "logprob_chunk_tokens": 16,
        "max_grad_norm": 0.1,
        "lr": 1e-2,
        "adam_eps": 1e-2,  # so large that a step depends on the size of the gradient, and on its clipping
        "algorithm": {"correction": {"mode": "bypass"}, "kl": {"placement": "none"}},
        **settings,
    }
    model = {"path": str(folder / "model"), "dtype": "float32"}
    worker = PolicyWorker(validate({"model": model, "learner": learner}, "test"), rank, num_ranks)
    worker.device = device
    worker.load()
    return worker


def pushed(worker: PolicyWorker, prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix} {n}": t.detach().cpu().clone() for n, t in worker.pushed.gathered(worker.compute_dtype)}


def take_step(worker: PolicyWorker, folder: Path, name: str) -> None:
    learner, config = worker.config.learner, worker.model.lm.config
    batch = batch_with_experts(name, config.num_hidden_layers, config.num_experts_per_tok)
    batch = with_advantages(batch, learner.algorithm, 0.0)
    share = learner.sequence_parallel
    own = partition(batch, worker.world_size // share, learner.micro_batch_tokens * share)[worker.rank // share]
    tensors = pushed(worker, "before")
    worker.log_probs(own)  # leaves weights gathered
    for factor in (2, 1):  # as a rewind to a snapshot does
        snapshot = {key.removeprefix("before "): factor * tensor for key, tensor in tensors.items()}
        worker.pushed.load(snapshot.__getitem__)
        loaded = pushed(worker, "before")
        assert all(torch.equal(loaded[key], factor * tensor) for key, tensor in tensors.items())
    report = worker.update(own, denominators_of(batch, learner.algorithm.loss), 1, 0, 0.0)
    assert report.step is not None and not report.step.skipped
    if learner.compile:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1, "nothing but the head was compiled"
    reports: list[Any] = [None] * worker.world_size
    dist.all_gather_object(reports, report)
    tensors |= {
        f"gradient {n}": full_weight(p.grad.to(worker.device)).cpu() for n, p in worker.model.lm.named_parameters()
    }
    tensors |= pushed(worker, "after")
    if worker.rank == 0:
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / f"{name}.safetensors")
        losses, routers = zip(*((each.loss, each.routers) for each in reports[::share]), strict=True)
        replayed = sum(each.replayed_share for each in routers if each is not None)  # compiled layers may have none
        said = {"loss": sum(losses), "norm": report.step.grad_norm, "replayed": replayed}
        (folder / f"{name}.json").write_text(json.dumps(said))


def state(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in worker.model.named_parameters():
        moments = worker.optimizer.state[parameter]
        for kind, tensor in (("weight", parameter), ("mean", moments["exp_avg"]), ("square", moments["exp_avg_sq"])):
            found[f"{kind} {name}"] = full_weight(tensor.detach().to(worker.device)).cpu().clone()
    return found


def assert_same(folder: Path, name: str, expected_name: str, tolerance: float) -> None:
    said, expected = (json.loads((folder / f"{case}.json").read_text()) for case in (name, expected_name))
    assert said == pytest.approx(expected, rel=tolerance)
    tensors, wanted = load_file(folder / f"{name}.safetensors"), load_file(folder / f"{expected_name}.safetensors")
    assert tensors.keys() == wanted.keys()
    for key, tensor in wanted.items():
        if key.startswith("before"):
            assert torch.equal(tensors[key], tensor), f"{key} is pushed with other bytes"
        scale = float(tensor.abs().max())
        difference = float((tensors[key] - tensor).abs().max())
        assert difference <= tolerance * scale, f"{key} differs by {difference:.3g} of {scale:.3g}"
    trained = [key.removeprefix("after ") for key in wanted if key.startswith("after") and "experts" in key]
    assert any(not torch.equal(wanted[f"before {name}"], wanted[f"after {name}"]) for name in trained)


def run_cases(folder: Path, cases: Cases, device: str, per_token: int = 2) -> None:
    """Run every rank of every case, all at once, with a model that chooses `per_token` experts for each token."""
    sizes = {"num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": per_token}
    model = tiny_model("qwen3_moe", num_hidden_layers=2, **sizes)
    model.save_pretrained(folder / "model")
    write_tokenizer(folder / "model", vocab_size=model.config.vocab_size)
    (folder / "cases.json").write_text(json.dumps(cases))
    processes = []
    try:
        for num_ranks in {ranks for ranks, _ in cases.values()}:
            for rank in range(num_ranks):
                arguments = [str(rank), str(num_ranks), str(folder), device]
                log = folder / f"rank-{rank}-{num_ranks}.log"
                processes.append(ForkedProcess(PROGRAM, arguments, log, {}, [PROGRAM]))
        codes = [process.wait(280) for process in processes]
        assert not any(codes), "\n".join(log.read_text() for log in sorted(folder.glob("rank-*.log")))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    rank, num_ranks, folder, device = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), torch.device(sys.argv[4])
    set_up_torch(1, compiles=True)
    backend = "gloo"
    if device.type == "cuda":
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    meeting = f"file://{folder}/store-{num_ranks}"
    dist.init_process_group(backend, meeting, timedelta(seconds=240), world_size=num_ranks, rank=rank)
    workers = {}
    for name, (ranks, settings) in json.loads((folder / "cases.json").read_text()).items():
        if ranks == num_ranks:
            workers[name] = load(rank, num_ranks, folder, device, settings)
            take_step(workers[name], folder, name)
    if WRITER in workers:
        workers[WRITER].stage(folder / "shards")
        workers[WRITER].finish_saving()
        expected, said = state(workers[WRITER]), {}
        for name, worker in workers.items():
            with torch.no_grad():
                for parameter in worker.model.parameters():
                    parameter.zero_()
            worker.load_checkpoint(folder / "shards")
            found = state(worker)
            said[name] = [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)]
        if rank == 0:
            (folder / "loaded.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
