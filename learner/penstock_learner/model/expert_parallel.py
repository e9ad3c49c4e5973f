"""Expert parallelism: each rank of a group computes its share of the experts, for the tokens of the whole group.

    [T tokens] ─► router ─► [T * k choices, by expert] ─► all-to-all ─► own experts ─► all-to-all back ─► weighted sum

The routers have chosen before, so replay, metrics and the auxiliary loss do not change. Tokens are exchanged within
groups of neighbouring ranks, and ranks with the same experts share these by FSDP2. A rank without any token takes
part in every exchange too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from penstock.errors import ConfigError


def find_experts(module: nn.Module) -> list[Any]:
    """The modules of transformers that hold routed experts fused: all their parameters have one row per expert."""
    return [
        each
        for each in module.modules()
        if hasattr(each, "is_transposed") and all(weight.shape[0] == each.num_experts for weight in each.parameters())
    ]


def require_experts(lm: Any, size: int) -> None:
    """Raise ConfigError if groups of `size` ranks cannot share the experts of a Hugging Face model."""
    if size == 1:
        return
    kind, experts = lm.config.get_text_config().model_type, find_experts(lm)
    if not experts:
        raise ConfigError(
            f"learner.expert_parallel must be 1 with type {kind}: transformers has no fused experts of it"
        )
    for each in experts:
        if each.num_experts % size:
            raise ConfigError(
                f"learner.expert_parallel {size} does not divide the {each.num_experts} experts of a layer of type "
                f"{kind}; set it to a divisor"
            )


def dense_mesh(shard_size: int, device_type: str) -> DeviceMesh | None:
    """The mesh of all other weights: None, which is FSDP2's own, or replicas of groups of `shard_size` ranks."""
    num_copies = dist.get_world_size() // (shard_size or dist.get_world_size())
    if num_copies == 1:
        return None
    return init_device_mesh(device_type, (num_copies, shard_size), mesh_dim_names=("replicate", "shard"))


def expert_mesh(size: int, shard_size: int, device_type: str) -> DeviceMesh | None:
    """The mesh of the experts' weights. Its last dimension is a group that exchanges tokens. None for groups of one."""
    if size == 1:
        return None
    sharing = shard_size or dist.get_world_size()
    num_copies, shape = dist.get_world_size() // sharing, (sharing // size, size)
    if num_copies == 1:
        return init_device_mesh(device_type, shape, mesh_dim_names=("shard", "experts"))
    return init_device_mesh(device_type, (num_copies, *shape), mesh_dim_names=("replicate", "shard", "experts"))


def shard_experts(layer: nn.Module, mesh: DeviceMesh, apply: Callable[..., Any]) -> None:
    """Give this rank its share of the experts of a decoder layer, and call `apply`, FSDP2's `fully_shard`, for them."""
    group, size = mesh["experts"], mesh["experts"].size()
    names = mesh.mesh_dim_names
    assert names is not None
    for experts in find_experts(layer):
        for name, weight in list(experts.named_parameters()):
            share = distribute_tensor(weight.data, group, [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(share, requires_grad=weight.requires_grad))
        experts.num_experts //= size
        experts.forward = partial(_exchanged, experts, group.get_group())
        apply(experts, mesh=mesh[names[:-1]])
        # FSDP2 averages over the ranks with the same experts. Their gradients are sums over each group already.
        experts.set_all_reduce_hook(lambda gradient: gradient.div_(size))


def _exchanged(experts: Any, group: dist.ProcessGroup, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """[T, H] the weighted sum of what the chosen experts [T, k] make of each token, wherever they are."""
    own, size = _OwnExperts(experts), group.size()
    num_tokens, num_choices = choices.shape
    order = choices.flatten().argsort(stable=True)
    sent = choices.flatten().bincount(minlength=size * own.num_experts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    ids = torch.arange(own.num_experts, device=sent.device).repeat(size).repeat_interleave(received)
    to, of = (counts.view(size, -1).sum(dim=1).tolist() for counts in (sent, received))
    rows = all_to_all_single_autograd(hidden[order // num_choices], of, to, group)
    made = own.run(rows, ids)
    back = all_to_all_single_autograd(made.contiguous(), to, of, group)[order.argsort()]
    summed: Tensor = (back.view(num_tokens, num_choices, -1) * weights.unsqueeze(-1)).sum(dim=1)
    return summed.to(hidden.dtype)


class _OwnExperts:
    """What the forward pass of an experts' module sees as `self`: the module with this rank's rows of its weights."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        for name, weight in experts.named_parameters():
            setattr(self, name, weight.to_local() if isinstance(weight, DTensor) else weight)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def run(self, rows: Tensor, ids: Tensor) -> Tensor:
        """What the expert of each row makes of it. Without rows the weights get a gradient of zeros, because FSDP2
        reduces it over ranks."""
        made: Tensor
        if len(rows):
            made = type(self._experts).forward(self, rows, ids.unsqueeze(1), rows.new_ones(len(rows), 1))
        else:
            made = rows + 0 * sum(getattr(self, name).sum() for name, _ in self._experts.named_parameters())
        return made
