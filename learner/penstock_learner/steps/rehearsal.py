"""Compiles the trained roles while the learner has nothing to train on: the rollout servers still start, or generate
the first batch.

torch compiles a layer when it is first called, for the sizes that it meets, and again for any size when it meets
others. So two batches of random tokens are run for each form that the sequences of a step can have. A form that was not
rehearsed is compiled in the step that meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from penstock.config.algorithms import LossConfig, ValueLossConfig
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.roles.role_group import RoleGroup, gather_all
from penstock_learner.steps.roles import RoleAccess
from penstock_learner.steps.stages import denominators_of

MIXED, LONG, EQUAL = "mixed lengths", "long prompts", "equal lengths"
_SIZES = {MIXED: ((48, 64), (80, 96)), LONG: ((560, 288), (592, 320)), EQUAL: ((1, 64), (1, 80))}
"""Tokens of the prompt and of the longest response, in the two batches of each form."""


async def rehearse(
    trained: Mapping[str, RoleGroup], access: RoleAccess, num_samples: int, max_tokens: int, vocabulary: int,
    is_needed: Callable[[], bool],
) -> int:  # fmt: skip
    """Compile what a step runs on policy and critic, form by form. Returns the number of batches. Forms with sequences
    beyond `max_tokens` are skipped. It ends early if `is_needed` says no before a batch: there is something to train
    on. Weights, optimizers and random numbers stay as they are."""
    algorithm = access.config.algorithm
    losses: dict[str, LossConfig | ValueLossConfig] = {"policy": algorithm.loss, "critic": algorithm.value_loss}
    done = 0
    for form, second in _forms(num_samples > 1 and "policy" in access.prefix_sharing, max_tokens):
        if not is_needed():
            break
        calls = []
        for role in (trained[name] for name in losses if name in trained):
            batch = rehearsal_batch(form, second, 2 * role.num_ranks, num_samples, vocabulary)
            shards, num_sharing = access.shards(role.name, role.num_ranks, batch)
            denominators = denominators_of(batch, losses[role.name])
            calls.append(
                role.call_each("rehearse", [(shard, denominators) for shard in shards for _ in range(num_sharing)])
            )
        await gather_all(*calls)
        done += 1
    return done


def _forms(shares_prefixes: bool, max_tokens: int) -> Iterator[tuple[str, int]]:
    """The forms of batches, the most frequent one first, each with the number of its batch."""
    for form in (MIXED, LONG) if shares_prefixes else (MIXED, EQUAL):
        if max(map(sum, _SIZES[form])) <= max_tokens:
            yield form, 0
            yield form, 1


def rehearsal_batch(form: str, second: int, num_groups: int, num_samples: int, vocabulary: int) -> SequenceBatch:
    """Groups of random tokens with a common prompt. Every size of the second batch differs from the first's."""
    prompt, longest = _SIZES[form][second]
    random = np.random.default_rng(second)
    num_groups += second
    num_sequences = num_groups * num_samples
    responses = np.full(num_sequences, longest, dtype=np.int64)
    if form != EQUAL:
        responses -= np.arange(num_sequences) % 8 * 3
    prompts = random.integers(0, vocabulary, (num_groups, prompt))
    tokens = [
        np.concatenate([prompts[index // num_samples], random.integers(0, vocabulary, size)])
        for index, size in enumerate(responses.tolist())
    ]
    num_tokens = int(responses.sum())
    zeros = np.zeros(num_tokens, dtype=np.float32)
    return SequenceBatch(
        token_ids=np.concatenate(tokens),
        lengths=responses + prompt,
        prompt_lengths=np.full(num_sequences, prompt, dtype=np.int64),
        rewards=np.zeros(num_sequences, dtype=np.float32),
        group_ids=np.repeat(np.arange(num_groups), num_samples),
        loss_mask=np.ones(num_tokens, dtype=np.uint8),
        behaviour_log_probs=zeros,
        token_versions=np.zeros(num_tokens, dtype=np.int64),
        temperatures=np.ones(num_tokens, dtype=np.float32),
        advantages=zeros,
        old_log_probs=zeros,
        values=zeros,
        returns=zeros,
    )
