"""Divides the GPUs of a verl run, on which everything takes turns, between engines and training."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.starter_gpus import SHARED_UTILIZATION, RoleGpus, shares_of_gpus


@dataclass(frozen=True)
class Division:
    num_servers: int
    tensor_parallel: int
    sequence_parallel: int
    roles: dict[str, RoleGpus]
    utilization: float | None
    """Set if the only server shares its GPU with training."""


def divide(
    num_gpus: int, tensor_parallel: int, sequence_parallel: int, roles: tuple[str, ...], num_rollout: int = 0
) -> Division:
    """Half of the GPUs, or `num_rollout` of them, for engines. Policy and reference share GPUs, and so do critic and
    reward model. A tensor or sequence parallelism that leaves no GPU for the other side is made smaller."""
    if num_gpus <= 1:
        return Division(1, 1, 1, shares_of_gpus(roles, 1), SHARED_UTILIZATION)
    for_engines = num_rollout or num_gpus // 2
    while tensor_parallel > for_engines:
        tensor_parallel = max(1, tensor_parallel // 2)
    num_servers = for_engines // tensor_parallel
    left = num_gpus - num_servers * tensor_parallel
    beside = tuple(role for role in roles if role in ("critic", "reward_model"))
    if beside and left == 1:
        return Division(num_servers, tensor_parallel, 1, shares_of_gpus(roles, 1), None)
    num_beside = left // 2 if beside else 0
    num_policy = left - num_beside
    while num_policy % sequence_parallel and num_policy >= 1:
        if num_policy > sequence_parallel:
            num_policy -= 1
        else:
            sequence_parallel = max(1, sequence_parallel // 2)
    with_policy = tuple(role for role in roles if role not in beside)
    divided = shares_of_gpus(with_policy, num_policy) | (shares_of_gpus(beside, num_beside) if beside else {})
    return Division(num_servers, tensor_parallel, sequence_parallel, divided, None)
