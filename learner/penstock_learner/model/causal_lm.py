"""A Hugging Face causal model as the learner uses it: packed tokens in, log-probs and entropies of the response out.

They come straight from hidden states: the [tokens, vocabulary] logits are never whole in memory. The forward pass takes
the whole vocabulary for a chunk of tokens, and keeps the log of each softmax's denominator. The backward pass takes all
tokens for a block of the vocabulary, with as many logits as a chunk has, and computes them and their gradient again.
One product then gives the complete gradient of the block's weight rows. Another is added, in float32, to the gradient
of the hidden states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import ConfigError, first_line_of
from penstock.machine import collecting_rarely
from penstock_learner.batches.partition import RankShard
from penstock_learner.model import experts
from penstock_learner.model.architectures import (
    LogitForm,
    ModelPath,
    decoder_of,
    embed_each_sequence,
    is_composite,
    logit_form_of,
    path_of,
    require_text_decoder,
)
from penstock_learner.model.attention import packed_attention
from penstock_learner.model.attention.packed_attention import prepare_masks, soft_cap
from penstock_learner.model.attention.packed_layout import ModelInputs, Packing, tree_of
from penstock_learner.model.attention.sequence_parallel import SequenceParallel
from penstock_learner.model.loading import FolderModel, UnreadWeights, open_lm, read_weights
from penstock_learner.model.recurrent_layers import pack_recurrent_layers
from penstock_learner.model.routers import RouterWatch

logger = logging.getLogger(__name__)
_PLAIN = LogitForm()
_ALIGNED = 128
"""The size of a vocabulary block is a multiple of this: products of odd sizes are slow."""


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    chunk_tokens: int,
    form: LogitForm = _PLAIN,
    compiled: bool = False,
    entropy_has_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob [T] of each target and entropy [T], with gradient to `hidden` [T, H] and `weight` [V, H]; the entropy's
    only if asked for. Both are float32 and use the logits in their `form`, divided by `temperatures` [T]. `compiled`
    fuses the operations between the matrix products."""
    # c · tanh(s · x / c) / t equals c' · tanh(x / c') / t' with c' = c / s and t' = t / s.
    temperatures = temperatures / form.scale if form.scale != 1 else temperatures
    cap = None if form.softcap is None else form.softcap / form.scale
    log_probs, entropy = _LogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperatures, cap, chunk_tokens, compiled, entropy_has_gradient
    )
    return log_probs, entropy


def log_probs_of_logits(
    logits: Tensor, targets: Tensor, temperatures: Tensor, *, chunk_tokens: int, entropy_has_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """The same from a model's own logits [T, V], which it has already scaled and capped. The gradient goes to them. The
    backward pass computes the softmax of each chunk again, so that it is never whole in memory."""
    statistics = partial(checkpoint, _statistics, cap=None, use_reentrant=False)
    log_probs, entropy, _ = _by_chunk(statistics, chunk_tokens, logits, targets, temperatures)
    return log_probs, entropy if entropy_has_gradient else entropy.detach()


def _by_chunk(function: Callable[..., tuple[Tensor, ...]], size: int, *tensors: Tensor) -> list[Tensor]:
    """The results of a function for `size` tokens at a time, each joined."""
    parts = [function(*chunk) for chunk in zip(*(tensor.split(size) for tensor in tensors), strict=True)]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits.float() if cap is None else soft_cap(logits.float(), cap)


def _statistics(
    logits: Tensor, targets: Tensor, temperatures: Tensor, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy, and log of the softmax's denominator, each [C] for a chunk of C tokens."""
    scaled = _capped(logits, cap) / temperatures.unsqueeze(1)
    highest = scaled.amax(dim=1)
    exponentials = (scaled - highest.unsqueeze(1)).exp()
    denominator = exponentials.sum(dim=1)
    log_denominator = highest + denominator.log()
    # Entropy is log Z - E[logit]. Both are taken relative to the highest logit, so large logits lose no precision.
    mean = (exponentials * (scaled - highest.unsqueeze(1))).sum(dim=1) / denominator
    chosen = _capped(logits.gather(1, targets.unsqueeze(1)).squeeze(1), cap) / temperatures
    return chosen - log_denominator, denominator.log() - mean, log_denominator


def _logit_gradient(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    log_denominator: Tensor,
    gradient: Tensor,
    cap: float | None,
    of_entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """[T, B], in the logits' type: gradient · (1[target] - probability) / temperature · slope of the soft cap. With
    `of_entropy`, entropies [T] and the gradient with respect to them [T], that gradient · -probability · (log-prob +
    entropy) is added to the factor before the division. `targets` are relative to the first entry of the block."""
    capped = _capped(logits, cap)
    log_probs = capped / temperatures.unsqueeze(1) - log_denominator.unsqueeze(1)
    # In place where nothing else reads them: a block of float32 logits is the largest tensor of a step.
    probabilities = log_probs.exp_() if of_entropy is None else log_probs.exp()
    is_target = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0) == targets.unsqueeze(1)
    result = (is_target.float() - probabilities) * (gradient / temperatures).unsqueeze(1)
    if of_entropy is not None:
        entropy, entropy_gradient = of_entropy
        slope = probabilities * (log_probs + entropy.unsqueeze(1))
        result = result - slope * (entropy_gradient / temperatures).unsqueeze(1)
    if cap is not None:
        result = result * (1 - (capped / cap).square())
    return result.to(logits.dtype)


@cache
def _functions(compiled: bool) -> tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Tensor]]:
    if not compiled:
        return _statistics, _logit_gradient
    return torch.compile(_statistics), torch.compile(_logit_gradient)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        cap: float | None,
        chunk_tokens: int,
        compiled: bool,
        entropy_has_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        statistics = _functions(compiled)[0]
        columns = _columns(weight)
        log_probs, entropy, log_denominator = _by_chunk(
            lambda h, *others: statistics(h @ columns, *others, cap), chunk_tokens, hidden, targets, temperatures
        )
        ctx.save_for_backward(hidden, weight, targets, temperatures, log_denominator, entropy)
        ctx.cap, ctx.chunk_tokens, ctx.compiled = cap, chunk_tokens, compiled
        ctx.entropy_has_gradient = entropy_has_gradient
        if not entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, entropy_gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperatures, log_denominator, entropy = ctx.saved_tensors
        of_entropy = (entropy, entropy_gradient) if ctx.entropy_has_gradient else None
        logit_gradient = _functions(ctx.compiled)[1]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        size = _block_size(len(hidden), len(weight), ctx.chunk_tokens)
        for first in range(0, len(weight), size):
            block = weight[first : first + size]
            grad_logits = logit_gradient(
                hidden @ _columns(block), targets - first, temperatures, log_denominator, gradient, ctx.cap, of_entropy
            )
            if grad_hidden is not None:
                _add_product(grad_hidden, grad_logits, block)
            if grad_weight is not None:
                torch.mm(grad_logits.t(), hidden, out=grad_weight[first : first + size])
            del grad_logits
        of_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return of_hidden, grad_weight, None, None, None, None, None, None


def _columns(weight: Tensor) -> Tensor:
    """The transposed weight [H, V]. For half precision on a CPU this is a row-major copy: with a transposed view torch
    on ARM calls oneDNN, which where the CPU lacks bfloat16 instructions warns and is turned off for the whole
    process."""
    is_half_on_cpu = weight.dtype in (torch.bfloat16, torch.float16) and not weight.is_cuda
    return weight.t().contiguous() if is_half_on_cpu else weight.t()


def _block_size(num_tokens: int, vocabulary: int, chunk_tokens: int) -> int:
    """Vocabulary entries per block: a block has about as many logits for all tokens as a chunk has."""
    num_blocks = max(1, -(-num_tokens // chunk_tokens))
    return -(-vocabulary // num_blocks // _ALIGNED) * _ALIGNED


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b, summed in the type of `total` even if a and b have fewer bits."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def hidden_states(lm: Any, token_ids: Tensor, positions: Tensor, packing: Packing) -> Tensor:
    """[tokens, hidden] after the last layer, on the packed path."""
    prepare_masks(lm, packing)
    states: Tensor = decoder_of(lm)(
        input_ids=token_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        packing=packing,
        seq_idx=packing,  # all that LFM2 hands to its convolutions
        use_cache=False,
    ).last_hidden_state[0]
    return states


def hidden_at(lm: Any, inputs: ModelInputs, wanted: Tensor) -> tuple[Tensor, Tensor | slice]:
    """The hidden states at those of the `wanted` packed tokens that this rank computes, and which of them these are:
    all, or under sequence parallelism the ones in its slice. `of_all_ranks` joins what is computed from them."""
    tokens, positions, parallel = inputs.token_ids, inputs.packing.columns, inputs.packing.parallel
    if parallel is None:
        return hidden_states(lm, tokens, positions, inputs.packing)[wanted], slice(None)
    num_tokens = len(tokens)
    own = parallel.own(num_tokens)
    mine = ((wanted >= own.start) & (wanted < own.stop)).nonzero().squeeze(1)
    tokens, positions = (parallel.pad(values[own], num_tokens) for values in (tokens, positions))
    return hidden_states(lm, tokens, positions, inputs.packing)[wanted[mine] - own.start], mine


def of_all_ranks(own: Tensor, mine: Tensor | slice, wanted: Tensor, packing: Packing) -> Tensor:
    """The numbers at all `wanted` tokens, of which this rank has computed its `own`."""
    if packing.parallel is None:
        return own
    assert isinstance(mine, Tensor)
    return packing.parallel.whole(own, mine, len(wanted))


def padded_inputs(inputs: ModelInputs) -> dict[str, Any]:
    """Arguments for Hugging Face's own forward: right-padded rows [S, L] and their mask. No token looks right, so
    padding changes nothing, whatever the layers are."""
    packing = inputs.packing
    assert packing.parallel is None, "ranks refuse to share sequences of models on the padded path"
    return {
        "input_ids": inputs.token_ids[packing.gather],
        "attention_mask": packing.is_token.long(),
        "use_cache": False,
    }


class CausalLM(FolderModel):
    """The head works on `chunk_tokens` tokens at a time. `compiled` fuses its element-wise operations."""

    def __init__(self, lm: nn.Module, chunk_tokens: int, path: ModelPath, *, compiled: bool = False) -> None:
        super().__init__(lm, path)
        self.chunk_tokens = chunk_tokens
        self.compiled = compiled
        self.adapted: dict[str, str] | None = None
        """With an adapter: the weights that it changes, and their names in the model's folder."""
        self.logit_form = logit_form_of(self.lm.config)
        self.watch: RouterWatch | None = None
        """Watches the routers of a mixture of experts, if set."""
        self.entropy_has_gradient = False
        """Whether a loss uses the entropy. Its gradient costs a little time and memory."""

    def forward(self, inputs: ModelInputs, *, padded: bool = False) -> tuple[Tensor, Tensor]:
        """Log-prob [T], with gradient, and entropy [T] of every response token. `padded` asks for Hugging Face's own
        forward also of a model on the packed path."""
        padded = padded or not self.path.is_packed
        with nullcontext() if self.watch is None else self.watch.forward_of(inputs, padded=padded):
            return self._forward_padded(inputs) if padded else self._forward_packed(inputs)

    def _forward_packed(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        hidden, mine = hidden_at(self.lm, inputs, inputs.predicting)
        results = self._head(hidden, inputs.targets[mine], inputs.temperatures[mine])
        log_probs, entropy = (of_all_ranks(own, mine, inputs.predicting, inputs.packing) for own in results)
        return log_probs, entropy

    def _forward_padded(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
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

    def _head(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        return log_probs_and_entropy(
            hidden,
            self.lm.get_output_embeddings().weight,
            targets,
            temperatures,
            chunk_tokens=self.chunk_tokens,
            form=self.logit_form,
            compiled=self.compiled,
            entropy_has_gradient=self.entropy_has_gradient,
        )


def forward_log_probs(
    model: CausalLM, part: RankShard, device: torch.device, parallel: SequenceParallel | None = None
) -> NDArray[np.float32]:
    """[T] log-probs of every micro-batch, concatenated, without gradient."""
    with torch.no_grad():
        results = [
            model(ModelInputs.of(micro, device, parallel, tree=tree_of(micro, part, model)))[0].float().cpu().numpy()
            for micro in part.micro_batches
        ]
    joined: NDArray[np.float32] = np.concatenate(results)
    return joined


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
    with collecting_rarely():
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
    experts.register()
    settings: dict[str, Any] = {"dtype": dtype, "experts_implementation": experts.NAME}
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **of_config)
        require_text_decoder(config, folder, key)
        path = path_of(config)
        if path.is_packed:
            settings["attn_implementation"] = packed_attention.NAME
        lm, unread = open_lm(kind, folder, config, key, new_head=new_head, **settings)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, NotImplementedError, OSError) as error:
        raise ConfigError(f"{key} {folder} cannot be loaded: {first_line_of(error)}; use another model") from error
    if path.is_packed and not _fits_packed(lm):
        path = ModelPath("its backbone or head has parts that the packed path does not know")
        lm.set_attn_implementation("sdpa")
    if path.is_packed:
        embed_each_sequence(lm)
        pack_recurrent_layers(lm)
    else:
        logger.warning("%s %s is trained with padding, which is slower: %s", key, folder, path.reason)
    return lm, path, unread


def _fits_packed(lm: Any) -> bool:
    head = getattr(lm, "score", None) or lm.get_output_embeddings()
    return (
        (hasattr(lm, "model") or is_composite(lm.config)) and head is not None and getattr(head, "bias", None) is None
    )
