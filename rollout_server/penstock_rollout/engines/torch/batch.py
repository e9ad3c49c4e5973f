"""The decoding batch of the torch engine: its rows, their KV cache, and sampling. One thread calls it.

The cache is one left-padded tensor per layer, [rows, heads, longest, head_dim]. Between two calls it holds the KV of
all tokens of a row except the last, which the next step feeds to the model. Prompts are prefilled in groups of equal
length, so no query is a padding token. Rows that join with the same tokens are prefilled once. xgrammar says which
tokens a constrained row may sample next.
"""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from penstock.errors import ConfigError, InvalidInput, one_line
from penstock.trajectory import ExpertIds, FinishReason
from penstock.weights.folder_tensors import stop_token_ids
from penstock_rollout.engines.engine import GenerateRequest, OutputConstraint, TokenChunk, segments_of


class RowConstraint:
    """The constraint of one row, at the place that its response has reached."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        import xgrammar

        self._matcher = matcher
        self._mask: torch.Tensor = xgrammar.allocate_token_bitmask(1, vocab_size)

    def apply(self, logits: torch.Tensor) -> None:
        """Set the logits [vocabulary] of tokens that may not come next to minus infinity, in place."""
        import xgrammar

        if self._matcher.fill_next_token_bitmask(self._mask):
            xgrammar.apply_token_bitmask_inplace(logits[None], self._mask.to(logits.device))

    def accept(self, token_id: int) -> None:
        accepted = self._matcher.accept_token(token_id)
        assert accepted, f"token {token_id} was sampled against the constraint"


@dataclass(eq=False)
class ConstraintCompiler:
    """Compiles constraints for one tokenizer. xgrammar keeps compiled ones."""

    model_path: Path
    vocab_size: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _compiler: Any = None

    def compile(self, constraint: OutputConstraint) -> RowConstraint:
        """Blocks while the grammar is compiled. Raises InvalidInput for a schema that xgrammar does not understand."""
        if importlib.util.find_spec("xgrammar") is None:
            raise InvalidInput("response_format", "the torch engine needs xgrammar to constrain its output; install it")
        import xgrammar

        with self._lock:
            compiler = self._compiler = self._compiler or self._create()
            try:
                if constraint.kind == "structural_tag":
                    grammar = compiler.compile_structural_tag(constraint.text)
                else:
                    schema = constraint.text if constraint.kind == "json_schema" else '{"type": "object"}'
                    grammar = compiler.compile_json_schema(schema, any_whitespace=False)
            except Exception as error:  # xgrammar raises errors of several kinds
                raise InvalidInput("response_format", f"the schema cannot be used: {one_line(error)[:200]}") from error
        return RowConstraint(xgrammar.GrammarMatcher(grammar), self.vocab_size)

    def _create(self) -> Any:
        import xgrammar
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model_path, local_files_only=True)
        stop_ids = list(stop_token_ids(self.model_path))
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self.vocab_size, stop_token_ids=stop_ids or None
        )
        return xgrammar.GrammarCompiler(info, max_threads=1)


@dataclass(eq=False)
class Row:
    """One request in the batch."""

    request: GenerateRequest
    tokens: list[int]
    """Prompt and response so far."""
    generator: torch.Generator | None
    """The request's own generator. If None, the batch's generator is used."""
    constraint: RowConstraint | None = None
    log_probs: list[float] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)
    """Each version, and the index of its first token."""
    experts: list[ExpertIds] = field(default_factory=list)
    """[tokens, layers, top_k] of each forward pass over the row, if experts are recorded."""
    finish_reason: FinishReason | None = None
    cancelled: bool = False
    num_delivered: int = 0

    @property
    def has_chunk(self) -> bool:
        num_new = len(self.log_probs) - self.num_delivered
        return self.finish_reason is not None or (self.request.stream and num_new >= self.request.min_chunk_tokens)

    def take_chunk(self) -> TokenChunk:
        """Return the tokens that were not delivered yet."""
        start, end = self.num_delivered, len(self.log_probs)
        self.num_delivered = end
        prompt = len(self.request.prompt_token_ids)
        return TokenChunk(
            token_ids=tuple(self.tokens[prompt + start : prompt + end]),
            log_probs=tuple(self.log_probs[start:end]),
            segments=segments_of(self.starts, start, end),
            finish_reason=self.finish_reason,
            routed_experts=np.concatenate(self.experts) if self.finish_reason and self.experts else None,
        )


class DecodeBatch:
    """The rows that decode together. `join` adds rows, and `step` draws one token for each."""

    def __init__(
        self, model: Any, stop_ids: frozenset[int], max_model_len: int, seed: int,
        recorder: ExpertRecorder | None = None,
    ) -> None:  # fmt: skip
        self.rows: list[Row] = []
        self._recorder = recorder
        self._model = model
        self._stop_ids = stop_ids
        self._max_model_len = max_model_len
        self._device = next(model.parameters()).device
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._products = SmallProducts(model)
        self._cache: Any = None
        _new_cache(model.config)

    @property
    def num_cached_tokens(self) -> int:
        return sum(len(row.tokens) - 1 for row in self.rows)

    def new_row(self, request: GenerateRequest, constraint: RowConstraint | None = None) -> Row:
        seed = request.sampling.seed
        generator = None if seed is None else torch.Generator(self._device).manual_seed(seed % 2**63)
        return Row(request, list(request.prompt_token_ids), generator, constraint)

    @torch.inference_mode()
    def join(self, rows: Sequence[Row], version: int) -> None:
        """Prefill the rows, draw one token for each, and add them to the batch."""
        by_length: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            by_length[len(row.tokens)].append(row)
        for length in sorted(by_length):
            self._prefill(by_length[length], version)
        self.drop_ended()

    @torch.inference_mode()
    def step(self, version: int) -> None:
        longest = max(len(row.tokens) for row in self.rows)
        lengths = torch.tensor([len(row.tokens) for row in self.rows], device=self._device)
        columns = torch.arange(longest, device=self._device)
        with self._products.passing(len(self.rows)):
            output = self._model(
                input_ids=torch.tensor([[row.tokens[-1]] for row in self.rows], device=self._device),
                position_ids=(lengths - 1)[:, None],
                attention_mask=(columns[None, :] >= longest - lengths[:, None]).long(),
                past_key_values=self._cache,
                use_cache=True,
            )
        if self._recorder is not None:
            for row, experts in zip(self.rows, self._recorder.take(len(self.rows)), strict=True):
                row.experts.append(experts)
        self._extend(self.rows, output.logits[:, -1], version)
        self.drop_ended()

    def release(self) -> list[Row]:
        """Remove and return all rows, and free their KV. `join` computes the KV again."""
        rows, self.rows, self._cache = self.rows, [], None
        return rows

    def _prefill(self, rows: list[Row], version: int) -> None:
        cache = _new_cache(self._model.config)
        places: dict[tuple[int, ...], int] = {}  # of every prompt, which the samples of a group have in common
        of_rows = [places.setdefault(tuple(row.tokens), len(places)) for row in rows]
        ids = torch.tensor(list(places), device=self._device)
        with self._products.passing(ids.numel()):
            output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if self._recorder is not None:
            experts = self._recorder.take(len(places))
            for row, place in zip(rows, of_rows, strict=True):
                row.experts = [experts[place]]
        logits = output.logits[:, -1]
        if len(places) < len(rows):
            chosen = torch.tensor(of_rows, device=self._device)
            logits = logits[chosen]
            _keep_rows(cache, chosen, ids.shape[1])
        self._extend(rows, logits, version)
        self.rows += rows
        if self._cache is None:
            self._cache = cache
            return
        longest = max(len(row.tokens) for row in self.rows) - 1
        for mine, new in zip(self._cache.layers, cache.layers, strict=True):
            if getattr(mine, "keys", None) is not None:
                mine.keys = torch.cat([_left_pad(mine.keys, longest), _left_pad(new.keys, longest)])
                mine.values = torch.cat([_left_pad(mine.values, longest), _left_pad(new.values, longest)])
            for states, others in zip(_states(mine), _states(new), strict=True):
                added = dict(_filled(others))
                states.update({index: torch.cat([state, added[index]]) for index, state in _filled(states)})

    def _extend(self, rows: list[Row], logits: torch.Tensor, version: int) -> None:
        token_ids, log_probs = self._draw(rows, logits.float())
        for row, token_id, log_prob in zip(rows, token_ids, log_probs, strict=True):
            if not row.starts or row.starts[-1][0] != version:
                row.starts.append((version, len(row.log_probs)))
            row.tokens.append(token_id)
            row.log_probs.append(log_prob)
            if row.constraint is not None:
                row.constraint.accept(token_id)
            if token_id in self._stop_ids and not row.request.sampling.ignore_eos:
                row.finish_reason = "stop"
            elif len(row.log_probs) >= row.request.sampling.max_tokens or len(row.tokens) >= self._max_model_len:
                row.finish_reason = "length"

    def _draw(self, rows: list[Row], logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Draw one token for each row. Returns the tokens and their log-probs. Sampling is an exponential race,
        argmax(p / e) with e ~ Exp(1), so each row can have its own generator. Temperature 0 takes the most likely token
        and reports its log-prob at temperature 1."""
        for index, row in enumerate(rows):
            if row.constraint is not None:
                row.constraint.apply(logits[index])
        samplings = [row.request.sampling for row in rows]
        temperature = torch.tensor([sampling.temperature or 1.0 for sampling in samplings], device=self._device)
        logits = logits / temperature[:, None]
        if any(sampling.top_p < 1 for sampling in samplings):
            logits = _nucleus(logits, torch.tensor([sampling.top_p for sampling in samplings], device=self._device))
        if any(sampling.top_k for sampling in samplings):
            logits = _most_likely(logits, [sampling.top_k for sampling in samplings])
        if any(sampling.min_p for sampling in samplings):
            min_p = torch.tensor([sampling.min_p for sampling in samplings], device=self._device)
            least = logits.max(dim=-1, keepdim=True).values + min_p.log()[:, None]
            logits = logits.masked_fill(logits < least, float("-inf"))
        log_probs = logits.log_softmax(dim=-1)
        race = torch.empty_like(log_probs).exponential_(generator=self._generator)
        for index, row in enumerate(rows):
            if row.generator is not None:
                race[index].exponential_(generator=row.generator)
        greedy = torch.tensor([sampling.temperature == 0 for sampling in samplings], device=self._device)
        chosen = torch.where(greedy[:, None], log_probs, log_probs - race.log()).argmax(dim=-1)
        return chosen.tolist(), log_probs.gather(1, chosen[:, None])[:, 0].tolist()

    def drop_ended(self) -> None:
        """Drop rows that are finished or cancelled. Keep only as much of the cache as the longest other one needs."""
        indices = [index for index, row in enumerate(self.rows) if not (row.finish_reason or row.cancelled)]
        if len(indices) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in indices]
        if not self.rows:
            self._cache = None
            return
        longest = max(len(row.tokens) for row in self.rows) - 1
        _keep_rows(self._cache, torch.tensor(indices, device=self._device), longest)


# ── the cache: keys and values padded on the left, and the states of recurrent layers, which have no length ──

States = dict[int, torch.Tensor | None]


def _new_cache(config: Any) -> Any:
    """An empty cache. Layers with a window keep the keys of the whole sequence, so that all have the same length. A
    model without attention is refused: transformers gives it another cache."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(config=config)
    if not any(map(_states, cache.layers)):
        return DynamicCache()
    if not any(hasattr(layer, "keys") for layer in cache.layers):
        raise ConfigError(
            f"the torch engine cannot serve a model of type {config.model_type} without attention; set "
            "rollout.engine.name to vllm, or use another model"
        )
    cache.layers = [layer if _states(layer) else DynamicLayer() for layer in cache.layers]
    return cache


def _keep_rows(cache: Any, rows: torch.Tensor, longest: int) -> None:
    """Keep these rows, and as much of their keys as the longest one needs."""
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys[rows, :, -longest:], layer.values[rows, :, -longest:]
        for states in _states(layer):
            states.update({index: state[rows] for index, state in _filled(states)})


def _states(layer: Any) -> list[States]:
    """The states of a recurrent layer, by their number."""
    return [layer.conv_states, layer.recurrent_states] if hasattr(layer, "conv_states") else []


def _filled(states: States) -> list[tuple[int, torch.Tensor]]:
    return [(index, state) for index, state in states.items() if state is not None]


def _left_pad(states: torch.Tensor, length: int) -> torch.Tensor:
    return pad(states, (0, 0, length - states.shape[-2], 0))


def _nucleus(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask all tokens outside the smallest set of most likely tokens whose probability reaches top_p."""
    ordered, order = logits.sort(dim=-1)
    unlikely = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p[:, None]
    unlikely[:, -1] = False
    return logits.masked_fill(torch.zeros_like(unlikely).scatter(-1, order, unlikely), float("-inf"))


def _most_likely(logits: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    """Mask all tokens but the `top_k` most likely ones of each row. 0 keeps all."""
    num_tokens = logits.shape[-1]
    kept = torch.tensor([min(k or num_tokens, num_tokens) for k in top_k], device=logits.device)
    least = logits.sort(dim=-1, descending=True).values.gather(1, kept[:, None] - 1)
    return logits.masked_fill(logits < least, float("-inf"))


_TOP_K = (torch.topk, torch.Tensor.topk)
_KINDS = re.compile(r"Router|Gate$|Gating")
"""Part of the class names of routers."""


class ExpertRecorder:
    """Listens to the routers of one model. Raises ConfigError for a model without any."""

    def __init__(self, model: Any) -> None:
        self._num_layers: int = model.config.get_text_config().num_hidden_layers
        self._chosen: dict[int, torch.Tensor] = {}
        self._num_experts = 0
        for name, module in model.named_modules():
            layer = re.search(r"\.(\d+)\.", name)
            sizes = [weight.shape[0] for weight in module.parameters() if weight.dim() == 2 and weight.shape[0] > 1]
            if layer is not None and sizes and _KINDS.search(type(module).__name__):
                self._num_experts = sizes[0]
                module.forward = partial(self._route, int(layer.group(1)), module.forward)
        if not self._num_experts:
            raise ConfigError(
                f"learner.router.replay is set, but a model of type {model.config.model_type} has no routers; set it "
                "to false"
            )

    def take(self, num_rows: int) -> ExpertIds:
        """Return [rows, tokens, layers, top_k] of the last forward pass, which had this many rows of equal length."""
        num_tokens, top_k = next(iter(self._chosen.values())).shape
        experts = torch.zeros(num_tokens, self._num_layers, top_k, dtype=torch.int64)
        for layer, chosen in self._chosen.items():
            experts[:, layer] = chosen.cpu()
        self._chosen = {}
        small = experts.numpy().astype(np.uint8 if self._num_experts <= 256 else np.uint16)
        return small.reshape(num_rows, -1, self._num_layers, top_k)

    def _route(self, layer: int, forward: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        with _Listening(self._num_experts) as listening:
            output = forward(*args, **settings)
        if listening.chosen is not None:
            self._chosen[layer] = listening.chosen
        return output


class _Listening(TorchFunctionMode):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self._num_experts = num_experts
        self.chosen: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Group-limited routers call topk over groups too, on three dimensions or with another width.
        if func in _TOP_K and args[0].dim() == 2 and args[0].shape[-1] == self._num_experts:
            self.chosen = result[1]
        return result


MAX_MULTIPLICATIONS = 8_000_000
"""Both libraries are equally fast here, as the mean of the products of a pass. On a Neoverse N1, float32, Qwen2: with
hidden sizes of 128, 256, 512 and 1024, forward passes of 400, 60, 22 and 8 tokens."""
ARM = ("aarch64", "arm64")


class SmallProducts:
    """Turns oneDNN off for forward passes of `model` that are faster without it. The switch is one for the whole
    process, so one thread may use this."""

    def __init__(self, model: Any, machine: str | None = None) -> None:
        """`machine` is the kind of CPU, by default this machine's."""
        sizes = [module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)]
        is_slow = (machine or platform.machine()) in ARM and model.device.type == "cpu" and bool(sizes)
        self.max_tokens = MAX_MULTIPLICATIONS * len(sizes) // sum(sizes) if is_slow else 0
        """The longest forward pass without oneDNN; 0 if there is none."""

    @contextlib.contextmanager
    def passing(self, num_tokens: int) -> Iterator[None]:
        """Surrounds a forward pass of this many tokens. Afterwards the switch is as it was."""
        onednn: Any = torch.backends.mkldnn
        was_on: bool = onednn.enabled
        onednn.enabled = was_on and num_tokens > self.max_tokens
        try:
            yield
        finally:
            onednn.enabled = was_on
