"""What a run does in one step: the input of every plan."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_tools.sizing.memory_terms import Setup


@dataclass(frozen=True)
class Workload:
    """What a run does in one step. Numbers of tokens are means."""

    groups_per_step: int = 64
    num_samples: int = 8
    prompt_tokens: int = 512
    response_tokens: int = 1024
    longest_sample: float = 1.8
    """Longest response of a group, as a multiple of the mean. A group is ready when its last sample is."""
    longest_tokens: int = 0
    """Tokens of the longest sample with its prompt. 0: as many as `longest_sample` says."""
    max_staleness: int = 2
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.9
    network_rate: float = 50e9
    """Network bandwidth per GPU between nodes, in bytes per second. The default is 400 Gbit/s."""
    setup: Setup = Setup()
    epochs_per_step: int = 1
    """Passes of the update over a batch."""
    recomputes_log_probs: bool = False
    """Whether the policy has a forward pass before its updates. A step with a single update has none, unless the reward
    has a KL penalty."""
    has_reference: bool = True
    """Whether there is a reference, which has the policy's size."""
    has_critic: bool = False
    """Whether there is a critic, which has the policy's size."""
    has_reward_model: bool = False
    """Whether there is a reward model, which has the policy's size."""

    def num_forwards(self, role: str) -> int:
        """Forward passes of a role over a batch, without those of its updates."""
        return 1 if role != "policy" or self.recomputes_log_probs else 0

    @property
    def tokens_per_step(self) -> int:
        return self.groups_per_step * self.num_samples * (self.prompt_tokens + self.response_tokens)

    @property
    def response_tokens_per_step(self) -> int:
        return self.groups_per_step * self.num_samples * self.response_tokens

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sample with its prompt."""
        return self.longest_tokens or self.prompt_tokens + round(self.longest_sample * self.response_tokens)
