"""Which GPUs of this machine each process of a local run may use."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.gpu_bundles import num_gpus
from penstock.config.run import RunConfig

VARIABLE = "CUDA_VISIBLE_DEVICES"


def divide_gpus(config: RunConfig, gpus: Sequence[str]) -> dict[str, dict[str, str]]:
    """The environment that each process gets: the learner has the first GPUs, then each rollout server its own.

    Empty if there are too few GPUs for that. All processes then see all of them, and share them as
    `learner.*.gpus_per_rank` and `rollout.engine.gpu_memory_utilization` say."""
    learner = config.learner
    num_for_learner = 0 if learner.ray_address else num_gpus(learner.placement, learner.needed_roles)
    num_per_server = config.rollout.engine.tensor_parallel_size
    if not gpus or num_for_learner + config.rollout.num_servers * num_per_server > len(gpus):
        return {}
    divided = {"learner": {VARIABLE: ",".join(gpus[:num_for_learner])}} if num_for_learner else {}
    for index in range(config.rollout.num_servers):
        start = num_for_learner + index * num_per_server
        divided[f"rollout-{index}"] = {VARIABLE: ",".join(gpus[start : start + num_per_server])}
    return divided
