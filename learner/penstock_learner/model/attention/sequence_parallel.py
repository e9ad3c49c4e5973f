"""Ulysses sequence parallelism: the ranks of a group hold slices of the same packed tokens.

Everything but attention works on one token at a time, so each rank computes its slice. Around attention two all-to-alls
exchange slices of tokens (all heads) for slices of heads (all tokens) and back:

    [N/P tokens, H heads] ─► [N tokens, H/P heads] ─► attention ─► [N tokens, H/P heads] ─► [N/P tokens, H heads]

If the key heads cannot be split over the ranks, each is repeated, so that every rank gets those that its queries use.
So there may be more ranks than key heads, up to one for each query head. The gradient of a key head is the sum of those
of its copies.

Every rank sees the results of all tokens (`whole`) and computes the same loss. In the backward pass each rank follows
only its own slice, so the gradients of the ranks add up to those of a single rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from penstock.errors import ConfigError


@dataclass(frozen=True)
class SequenceParallel:
    """The group of ranks that share sequences, and this rank's place in it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def own(self, num_tokens: int) -> slice:
        """The slice of this rank. The slices of the last ranks may be shorter; `pad` makes all of them equally long."""
        share = -(-num_tokens // self.size)
        return slice(min(self.rank * share, num_tokens), min((self.rank + 1) * share, num_tokens))

    def pad(self, tokens: Tensor, num_tokens: int, value: int = 0) -> Tensor:
        """Fill a slice of tokens with `value` to the length that all ranks have."""
        missing = -(-num_tokens // self.size) - len(tokens)
        return torch.cat([tokens, tokens.new_full((missing, *tokens.shape[1:]), value)])

    def scatter_heads(self, q: Tensor, k: Tensor, v: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Each from [N / P, heads, dim] to [N, heads / P, dim]."""
        if q.shape[1] % self.size:
            raise ConfigError(
                f"{q.shape[1]} attention heads cannot be split over {self.size} ranks; "
                "set sequence_parallel to a divisor of the heads"
            )
        q, k, v = (self._to_heads(states)[:num_tokens] for states in (q, self._spread(k), self._spread(v)))
        return q, k, v

    def gather_heads(self, output: Tensor) -> Tensor:
        """From [N, heads / P, dim] to [N / P, heads, dim]."""
        num_tokens, heads, dim = output.shape
        share = -(-num_tokens // self.size)
        padded = torch.nn.functional.pad(output, (0, 0, 0, 0, 0, share * self.size - num_tokens))
        exchanged = all_to_all_single_autograd(padded.contiguous(), None, None, self.group)
        return exchanged.view(self.size, share, heads, dim).transpose(0, 1).reshape(share, self.size * heads, dim)

    def whole(self, own: Tensor, index: Tensor, num_entries: int) -> Tensor:
        """One tensor with every rank's `own` entries at their `index`. The gradient goes to `own` alone."""
        result: Tensor = _Whole.apply(own, index, num_entries, self.group)  # type: ignore[no-untyped-call]
        return result

    def _spread(self, states: Tensor) -> Tensor:
        """Repeat key heads as often as needed to give every rank a slice."""
        repeats = self.size // math.gcd(self.size, states.shape[1])
        return states if repeats == 1 else states.repeat_interleave(repeats, dim=1)

    def _to_heads(self, states: Tensor) -> Tensor:
        share, heads, dim = states.shape
        slices = states.view(share, self.size, heads // self.size, dim).transpose(0, 1).contiguous()
        exchanged = all_to_all_single_autograd(slices.flatten(0, 1), None, None, self.group)
        return exchanged.view(self.size * share, heads // self.size, dim)


def make_sequence_parallel(size: int) -> SequenceParallel | None:
    """Make groups of `size` neighbouring ranks of the default process group. None for groups of one. Collective."""
    if size == 1:
        return None
    world_size, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
    group = groups[rank // size]
    assert isinstance(group, dist.ProcessGroup)
    return SequenceParallel(group, rank % size, size)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, index: Tensor, num_entries: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(index)
        whole = own.new_zeros(num_entries, *own.shape[1:]).index_copy(0, index, own)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return gradient[index], None, None, None
