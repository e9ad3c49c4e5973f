"""A Hugging Face causal model as the learner uses it: packed tokens in, log-probs and entropies of the response out."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, first_line_of
from penstock_learner.model.architectures import (
    ModelPath,
    embed_each_sequence,
    logit_form_of,
    path_of,
    require_text_decoder,
)
from penstock_learner.model.attention import packed_attention
from penstock_learner.model.attention.packed_attention import prepare_masks
from penstock_learner.model.attention.packed_layout import ModelInputs, Packing
from penstock_learner.model.attention.sequence_parallel import SequenceParallel
from penstock_learner.model.loading import FolderModel, UnreadWeights, open_lm, read_weights
from penstock_learner.model.log_prob_head import log_probs_and_entropy, log_probs_of_logits
from penstock_learner.model.routers import RouterWatch

logger = logging.getLogger(__name__)


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


class CausalLM(FolderModel):
    """Wraps the model so that the sharded root covers embedding, layers and head in one forward pass. The head works on
    `chunk_tokens` tokens at a time. `compiled` fuses its element-wise operations."""

    def __init__(self, lm: nn.Module, chunk_tokens: int, path: ModelPath, *, compiled: bool = False) -> None:
        super().__init__()
        self.lm = lm
        self.chunk_tokens = chunk_tokens
        self.path = path
        self.compiled = compiled
        self.adapted: dict[str, str] | None = None
        """With an adapter: the weights that it changes, and their names in the model's folder."""
        self.logit_form = logit_form_of(self.lm.config)
        self.watch: RouterWatch | None = None
        """Watches the routers of a mixture of experts, if set."""
        self.entropy_has_gradient = False
        """Whether a loss uses the entropy. Its gradient costs a little time and memory."""
        if path.is_packed:
            packed_attention.mark_layers(lm)

    def forward(self, inputs: ModelInputs, *, padded: bool = False) -> tuple[Tensor, Tensor]:
        """Log-prob [T], with gradient, and entropy [T] of every response token. `padded` asks for Hugging Face's own
        forward also of a model on the packed path."""
        padded = padded or not self.path.is_packed
        with nullcontext() if self.watch is None else self.watch.forward_of(inputs, padded=padded):
            return self._forward_padded(inputs) if padded else self._forward_packed(inputs)

    def _forward_packed(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        if inputs.packing.parallel is not None:
            return self._forward_slice(inputs, inputs.packing.parallel)
        hidden = hidden_states(self.lm, inputs.token_ids, inputs.packing.columns, inputs.packing)
        return self._head(hidden[inputs.predicting], inputs.targets, inputs.temperatures)

    def _forward_padded(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        if inputs.packing.parallel is not None:
            raise ConfigError(f"learner.sequence_parallel must be 1 with this model: {self.path.reason}")
        packing = inputs.packing
        logits: Tensor = self.lm(**padded_inputs(inputs)).logits
        predicting = logits[packing.rows[inputs.predicting], packing.columns[inputs.predicting]]
        return log_probs_of_logits(
            predicting,
            inputs.targets,
            inputs.temperatures,
            chunk_tokens=self.chunk_tokens,
            entropy_has_gradient=self.entropy_has_gradient,
        )

    def _forward_slice(self, inputs: ModelInputs, parallel: SequenceParallel) -> tuple[Tensor, Tensor]:
        """Compute this rank's slice of the tokens. Every rank gets the results of all tokens."""
        num_tokens = len(inputs.token_ids)
        own = parallel.own(num_tokens)
        mine = ((inputs.predicting >= own.start) & (inputs.predicting < own.stop)).nonzero().squeeze(1)
        tokens, positions = (
            parallel.pad(values[own], num_tokens) for values in (inputs.token_ids, inputs.packing.columns)
        )
        hidden = hidden_states(self.lm, tokens, positions, inputs.packing)
        results = self._head(
            hidden[inputs.predicting[mine] - own.start], inputs.targets[mine], inputs.temperatures[mine]
        )
        log_probs, entropy = (parallel.whole(result, mine, len(inputs.targets)) for result in results)
        return log_probs, entropy

    def _head(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        return log_probs_and_entropy(
            hidden,
            self.lm.lm_head.weight,
            targets,
            temperatures,
            chunk_tokens=self.chunk_tokens,
            form=self.logit_form,
            compiled=self.compiled,
            entropy_has_gradient=self.entropy_has_gradient,
        )


def load_model(path: Path, dtype: torch.dtype, chunk_tokens: int, *, compiled: bool = False) -> CausalLM:
    """Load a Hugging Face folder into host memory, whole. Errors are those of `open_model`."""
    model = open_model(path, dtype, chunk_tokens, compiled=compiled)
    read_weights(model, torch.device("cpu"))
    return model


def open_model(
    path: Path, dtype: torch.dtype, chunk_tokens: int, *, compiled: bool = False, key: str = "model.path"
) -> CausalLM:
    """Make the model of a Hugging Face folder on the path that its architecture takes. Never reaches the network. It is
    on the meta device until `read_weights`. Raises ConfigError, in one line and with the config's `key`, for a folder
    that holds no causal model which Hugging Face can load."""
    from transformers import AutoModelForCausalLM

    lm, model_path, unread = open_on_path(AutoModelForCausalLM, path, key, dtype)
    model = CausalLM(lm, chunk_tokens, model_path, compiled=compiled)
    model.unread = unread
    return model


def open_on_path(
    kind: Any, folder: Path, key: str, dtype: torch.dtype, *, new_head: str = "", **of_config: Any
) -> tuple[Any, ModelPath, UnreadWeights | None]:
    """Make the model of a folder with an Auto class of Hugging Face, and choose its path. Errors name the config's
    `key`. `new_head` is that of `open_lm`; `of_config` changes the folder's config."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{key} {folder} is not a model folder (no config.json); give a Hugging Face checkpoint")
    from transformers import AutoConfig

    packed_attention.register()
    settings: dict[str, Any] = {"dtype": dtype}
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **of_config)
        require_text_decoder(config, folder, key)
        path = path_of(config)
        if path.is_packed:
            settings["attn_implementation"] = packed_attention.NAME
        lm, unread = open_lm(kind, folder, config, key, new_head=new_head, **settings)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, NotImplementedError, OSError) as error:
        first_line = first_line_of(error)
        raise ConfigError(f"{key} {folder} cannot be loaded: {first_line}; use another model") from error
    if path.is_packed and not _fits_packed(lm):
        path = ModelPath("its backbone or head has parts that the packed path does not know")
        lm.set_attn_implementation("sdpa")
    if path.is_packed:
        embed_each_sequence(lm)
    else:
        logger.warning("%s %s is trained with padding, which is slower: %s", key, folder, path.reason)
    return lm, path, unread


def _fits_packed(lm: Any) -> bool:
    head = getattr(lm, "lm_head", getattr(lm, "score", None))
    return hasattr(lm, "model") and head is not None and getattr(head, "bias", None) is None
