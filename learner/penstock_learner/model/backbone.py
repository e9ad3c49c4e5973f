"""Code that all models share: a micro-batch on the device, and its hidden states from a Hugging Face backbone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock_learner.batches.partition import RankShard
from penstock_learner.batches.prefix_tree import PrefixTree
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.model.attention.packed_attention import prepare_masks
from penstock_learner.model.attention.packed_layout import Packing
from penstock_learner.model.attention.sequence_parallel import SequenceParallel
from penstock_learner.model.tensors import to_device


@dataclass(frozen=True)
class ModelInputs:
    """A micro-batch on the device: N packed tokens, of which T are response tokens. A token that several sequences
    share may be stored once. N counts the stored tokens then, and T may exceed the response tokens among them."""

    token_ids: Tensor
    """[N] prompt and response of each sequence."""
    packing: Packing
    predicting: Tensor
    """[T] index of the token before each response token. Its hidden state predicts the response token."""
    targets: Tensor
    """[T] the response tokens."""
    temperatures: Tensor
    """[T] sampling temperature of each response token."""
    routed_experts: Tensor | None = None
    """[N, layers, top_k] the experts that the engine chose, -1 where it reported none."""

    @classmethod
    def of(
        cls,
        batch: SequenceBatch,
        device: torch.device,
        parallel: SequenceParallel | None = None,
        *,
        tree: PrefixTree | None = None,
    ) -> ModelInputs:
        """The inputs of a batch. With its `tree`, tokens that several sequences of a group begin with are stored once.
        The padded path does not take these."""
        index = batch.response_index
        predicting, targets = index - 1, batch.token_ids[index]
        token_ids, experts = batch.token_ids, batch.routed_experts
        if tree is not None:
            packing = Packing.of_tree(tree, device, parallel)
            token_ids, predicting = token_ids[tree.stored], tree.places[predicting]
            experts = None if experts is None else experts[tree.stored]
        else:
            packing = Packing.of(batch.lengths, device, parallel)
        return cls(
            to_device(token_ids, device),
            packing,
            to_device(predicting, device),
            to_device(targets, device),
            to_device(batch.temperatures, device),
            None if experts is None else to_device(experts, device),
        )


def tree_of(micro: SequenceBatch, part: RankShard, model: Any) -> PrefixTree | None:
    """The tree of a micro-batch of this part, if the model computes shared tokens once. The padded path cannot."""
    if not (part.shares_prefixes and model.path.is_packed):
        return None
    return part.tree or PrefixTree.of(micro)


def hidden_states(lm: Any, token_ids: Tensor, positions: Tensor, packing: Packing) -> Tensor:
    """[tokens, hidden] after the last layer, on the packed path. The backbone of `lm` is called `model`."""
    prepare_masks(lm, packing)
    states: Tensor = lm.model(
        input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), packing=packing, use_cache=False
    ).last_hidden_state[0]
    return states


def padded_inputs(inputs: ModelInputs) -> dict[str, Any]:
    """Arguments for Hugging Face's own forward: right-padded rows [S, L] and their mask. No token looks right, so
    padding changes nothing, whatever the layers are."""
    packing = inputs.packing
    return {
        "input_ids": inputs.token_ids[packing.gather],
        "attention_mask": packing.is_token.long(),
        "use_cache": False,
    }


def decoder_layers(lm: Any) -> tuple[str, nn.ModuleList]:
    """The decoder layers of a Hugging Face model, and the name under which it has them, such as `model.layers`."""
    config = lm.config.get_text_config()
    found = [
        (name, module)
        for name, module in lm.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if not found:
        raise ConfigError(
            f"model type {lm.config.model_type} has no list of {config.num_hidden_layers} layers, so it cannot be "
            "sharded; use another model"
        )
    return found[0]
