"""What rollout servers and the learner make of a leased prompt: its tokens, a group, a batch, and trained samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.codec import decode_group, decode_prompt, encode_group
from penstock.errors import InvalidInput
from penstock.replay.queue_types import Lease
from penstock.samples import Sample, TokenText
from penstock.trajectory import Group, Trajectory, VersionSegment
from penstock_learner.batches.partition import partition
from penstock_learner.batches.sequence_batch import batch_of, check_tokens
from penstock_learner.loggers.samples import TrainedStep, samples_of_step
from penstock_rollout.tokenization import Tokenization

RESPONSE = Trajectory(
    token_ids=np.array([5, 6, 7], dtype=np.int32), loss_mask=np.ones(3, dtype=np.uint8),
    log_probs=np.full(3, -0.5, dtype=np.float32), segments=(VersionSegment(0, 3, 1),), reward=1.0, reward_parts={},
)  # fmt: skip


def trained_samples(step: int, leases: Sequence[Lease], tokenization: Tokenization) -> list[list[Sample]]:
    """Answer every prompt, and pack the groups as a step does. Only a prompt of tokens that the model does not have is
    refused, because the gateway does not know the model."""
    groups = []
    for lease in leases:
        prompt = decode_prompt(lease.payload)
        try:
            ids = np.array(tokenization.prompt_ids(prompt), dtype=np.int32)
        except InvalidInput as error:
            assert error.field == "token_ids", error
            continue
        group = Group(
            "test", lease.prompt_id, lease.attempt, "r0", prompt.data_source, prompt.sampling, ids, (RESPONSE,),
            agent_name=prompt.agent_name,
        )  # fmt: skip
        groups.append(decode_group(encode_group(group)))
        check_tokens(groups[-1], len(tokenization.tokenizer))
    if not groups:
        return []
    shards = partition(batch_of(groups), 2, 4096)
    assert sorted(i for shard in shards for part in shard.sequences for i in part) == list(range(len(groups)))
    prompts = {lease.prompt_id: lease.payload for lease in leases}
    trained = TrainedStep(step, 1, groups, prompts, np.ones(len(groups), dtype=np.float32))
    return samples_of_step(trained, TokenText(tokenization.tokenizer.backend_tokenizer))
