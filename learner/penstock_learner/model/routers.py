"""The routers of a mixture of experts: what they choose in a forward pass, and replaying what an engine chose.

A router scores the experts for each token, takes the `top_k` best, and weights their outputs by their scores. Every
router of transformers chooses with one call of `topk` over [tokens, experts]. A watched router passes that call on to
here. When it replays, the given experts take the place of the best ones, and their weights still come from the router's
own scores, with gradient. A replayed token that has no reported experts (-1) keeps the router's own choice.

What a layer replays is one of its arguments, and what its routers did is part of its output. So a layer may be compiled
and computed again in the backward pass. Hooks around it add the argument and take the part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.config.learner import LearnerConfig, RouterConfig
from penstock.errors import ConfigError
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.loading import decoder_layers

_TOP_K = (torch.topk, Tensor.topk)
_KINDS = re.compile(r"Router|Gate$|Gating")
"""Part of the class names of routers. Some models record router logits of a whole block instead."""
_NO_EXPERT = -1


@dataclass(frozen=True)
class Router:
    name: str
    module: Any
    layer: int
    logits_index: int
    """Where the router's output has the logits [tokens, experts]."""
    num_experts: int


class RouterUsage(NamedTuple):
    """How one router used its experts in a forward pass. Padding does not count."""

    counts: Tensor
    """[experts] how often each expert was chosen."""
    probabilities: Tensor
    """[experts] sum over the tokens of the experts' probabilities, with gradient if a loss needs it."""
    num_replayed: Tensor
    """Tokens whose experts were replayed."""


@dataclass(frozen=True)
class Balance:
    """How evenly the experts were used in a micro-batch."""

    loss: Tensor
    """The auxiliary loss of Switch Transformers, as in transformers' `load_balancing_loss_func`: `top_k` if all experts
    are used alike, up to the number of experts if one does all the work."""
    counts: Tensor
    """[routers, experts] how often each expert was chosen."""
    replayed_share: Tensor
    """Share of the choices that were replayed."""


def find_routers(lm: Any) -> list[Router]:
    """The routers of a Hugging Face model in the order of its layers. Empty for a dense model."""
    recorded: Any = (getattr(lm, "_can_record_outputs", None) or {}).get("router_logits", ())
    recorders: list[Any] = list(recorded) if isinstance(recorded, (list, tuple)) else [recorded]
    found = []
    for name, module in lm.named_modules():
        layer = re.search(r"\.(\d+)\.", name)
        recorder = next((each for each in recorders if isinstance(module, getattr(each, "target_class", each))), None)
        if recorder is None or layer is None or not _KINDS.search(type(module).__name__):
            continue
        sizes = [weight.shape[0] for weight in module.parameters() if weight.dim() == 2 and weight.shape[0] > 1]
        if sizes:
            found.append(Router(name, module, int(layer.group(1)), getattr(recorder, "index", 0), sizes[0]))
    return found


def watch_routers(lm: Any, learner: LearnerConfig) -> RouterWatch | None:
    """Watch the routers of a model as `learner.router` says, before its layers are compiled. None for a dense model.
    Raises ConfigError if the settings need routers that the model does not have."""
    settings, routers = learner.router, find_routers(lm)
    if settings.is_used:
        require_routers(lm, routers, replay=settings.replay)
    return RouterWatch(lm, routers, settings) if routers else None


def require_routers(lm: Any, routers: list[Router], *, replay: bool) -> None:
    """Raise ConfigError if the model has no routers, or for a replay, several in one layer or one expert per token: a
    report of one expert cannot be told from the zero of an engine that knows nothing."""
    kind = lm.config.get_text_config().model_type
    if not routers:
        raise ConfigError(
            f"learner.router is set, but a model of type {kind} has no routers that can be watched; omit it"
        )
    layers = [router.layer for router in routers]
    if replay and len(set(layers)) < len(layers):
        raise ConfigError(
            f"learner.router.replay cannot be used with type {kind}, which has several routers in a layer; set it to "
            "false"
        )
    if replay and any(getattr(router.module, "top_k", None) == 1 for router in routers):
        raise ConfigError(
            f"learner.router.replay cannot be used with this model of type {kind}, which chooses one expert per token; "
            "set it to false"
        )


class RouterWatch:
    """Watches the routers of one model. It knows how they used their experts in the last forward pass."""

    def __init__(self, lm: Any, routers: list[Router], settings: RouterConfig) -> None:
        self.routers = routers
        self.settings = settings
        self._used: list[RouterUsage] = []
        self._counted: Tensor | None = None
        """[rows] how many tokens a row of a router's input stands for. None outside of `forward_of`."""
        self._experts: Tensor | None = None
        """[tokens, layers, top_k] to replay."""
        prefix, layers = decoder_layers(lm)
        layer: Any
        for index, layer in enumerate(layers):
            own = [router for router in routers if router.name.startswith(f"{prefix}.{index}.")]
            for router in own:
                router.module.seat = _Seat(router.num_experts, router.logits_index, settings.aux_loss_coefficient > 0)
                _change(router.module, _watched_router)
            if own:
                layer.seats = [router.module.seat for router in own]
                _change(layer, _watched_layer)
                layer.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)
                layer.register_forward_hook(partial(self._leave, own))

    @contextmanager
    def forward_of(self, inputs: ModelInputs, *, padded: bool) -> Iterator[None]:
        """Wraps the forward pass of these inputs, in the layout that the model computes them in."""
        self._used = []
        experts = inputs.routed_experts if self.settings.replay else None
        if experts is not None and experts.shape[1] <= max(router.layer for router in self.routers):
            experts = None  # the experts of another model
        self._counted, self._experts = _laid_out(inputs, padded, experts)
        try:
            yield
        finally:
            self._counted = self._experts = None

    def balance(self) -> Balance | None:
        """How evenly the last forward pass used the experts. None if no router could be watched."""
        used, self._used = self._used, []
        if not used:
            return None
        counts = torch.stack([usage.counts for usage in used])
        probabilities = torch.stack([usage.probabilities for usage in used]).sum(dim=0)
        num_rows = probabilities.detach().sum()  # the probabilities of a token add up to 1
        shares = counts.sum(dim=0) / num_rows
        loss = counts.shape[1] * (shares * probabilities / num_rows).sum()
        replayed = torch.stack([usage.num_replayed for usage in used]).sum()
        return Balance(loss, counts, replayed / num_rows)

    def _enter(self, index: int, layer: Any, args: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self._counted is None:
            return args, settings
        forced = None if self._experts is None else self._experts[:, index].long()
        return args, settings | {"routing": (self._counted, forced)}

    def _leave(self, routers: list[Router], layer: Any, args: Any, output: Any) -> Any:
        if self._counted is None:
            return output
        output, used = output
        if self.settings.is_used and None in used:
            name = routers[used.index(None)].name
            raise ConfigError(f"learner.router is set, but {name} does not choose by topk; omit it")
        if torch.is_grad_enabled():
            self._used += [usage for usage in used if usage is not None]
        return output


# ── inside a layer, which may be compiled ──
#
# Layers of a class share their compiled code. It is compiled again for every other value that it reads, so nothing here
# depends on the number of a layer.


@dataclass(eq=False)
class _Seat:
    """What a layer hands to one of its routers, and gets from it, while it is computed."""

    num_experts: int
    logits_index: int
    has_loss: bool
    """Whether a loss needs the gradient of the experts' probabilities."""
    counted: Tensor | None = None
    forced: Tensor | None = None
    usage: RouterUsage | None = None


def _change(module: Any, make: Callable[[Any], type[Any]]) -> None:
    kind: Any = type(module)
    module.__class__ = make(kind)


@cache
def _watched_layer(kind: Any) -> type[Any]:
    plain = kind.forward

    def forward(self: Any, *args: Any, routing: tuple[Tensor, Tensor | None] | None = None, **settings: Any) -> Any:
        if routing is None:
            return plain(self, *args, **settings)
        for seat in self.seats:
            seat.counted, seat.forced = routing
        output = plain(self, *args, **settings)
        used = [seat.usage for seat in self.seats]
        for seat in self.seats:
            seat.counted = seat.forced = seat.usage = None
        return output, used

    return type(kind.__name__, (kind,), {"forward": forward})


@cache
def _watched_router(kind: Any) -> type[Any]:
    plain = kind.forward

    def forward(self: Any, *args: Any, **settings: Any) -> Any:
        seat: _Seat = self.seat
        if seat.counted is None:
            return plain(self, *args, **settings)
        choosing = _Choosing(seat.num_experts, seat.forced)
        with choosing:
            output = plain(self, *args, **settings)
        if choosing.chosen is not None:
            seat.usage = _usage(output[seat.logits_index], choosing, seat.counted, seat.has_loss)
        return output

    return type(kind.__name__, (kind,), {"forward": forward})


def _usage(logits: Tensor, choosing: _Choosing, counted: Tensor, has_loss: bool) -> RouterUsage:
    assert choosing.chosen is not None
    scores = logits if has_loss else logits.detach()
    probabilities = (scores.float().softmax(dim=-1) * counted[:, None]).sum(dim=0)
    counts = torch.zeros(logits.shape[-1], device=logits.device)
    counts.scatter_add_(0, choosing.chosen.flatten(), counted.repeat_interleave(choosing.chosen.shape[-1]))
    return RouterUsage(counts, probabilities, (choosing.is_replayed * counted).sum())


class _Choosing(TorchFunctionMode):
    """Takes the call of `topk` by which a router chooses, and replaces what it chooses by `forced` [tokens, top_k]."""

    def __init__(self, num_experts: int, forced: Tensor | None) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.forced = forced
        self.chosen: Tensor | None = None
        """[tokens, top_k] the experts that are used, once the router has chosen."""
        self.is_replayed: Tensor | float = 0.0
        """[tokens] 1 where the choice was replayed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Group-limited routers call topk over groups too, on three dimensions or with another width.
        if func not in _TOP_K or args[0].dim() != 2 or args[0].shape[-1] != self.num_experts:
            return result
        experts: Tensor = result[1]
        if self.forced is not None and self.forced.shape == experts.shape:
            usable = _usable(self.forced, self.num_experts)
            experts = torch.where(usable[:, None], self.forced, experts)
            result = torch.return_types.topk((args[0].gather(-1, experts), experts))
            self.is_replayed = usable.float()
        self.chosen = experts.detach()
        return result


def _usable(forced: Tensor, num_experts: int) -> Tensor:
    """[tokens] whether a row names different experts that exist. An engine reports zeros where it knows nothing."""
    num_equal = (forced.unsqueeze(2) == forced.unsqueeze(1)).sum(dim=(1, 2))
    return (num_equal == forced.shape[1]) & (forced.amin(dim=1) >= 0) & (forced.amax(dim=1) < num_experts)


def _laid_out(inputs: ModelInputs, padded: bool, experts: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """How many tokens each row of a router's input stands for, and the experts to replay for it."""
    packing = inputs.packing
    if padded:
        is_token = packing.is_token.flatten()
        if experts is not None:
            experts = experts[packing.gather.flatten()].masked_fill(~is_token[:, None, None], _NO_EXPERT)
        return is_token.float(), experts
    num_tokens = len(inputs.token_ids)
    counts = torch.ones(num_tokens, device=inputs.token_ids.device) if packing.paths is None else packing.paths.counts
    if packing.parallel is None:
        return counts, experts
    own = packing.parallel.own(num_tokens)
    if experts is not None:
        experts = packing.parallel.pad(experts[own], num_tokens, _NO_EXPERT)
    return packing.parallel.pad(counts[own], num_tokens), experts
