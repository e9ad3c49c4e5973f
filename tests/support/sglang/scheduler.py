"""The scheduler of the SGLang stand-in: a real model, decoded step by step as SGLang's non-overlapping loop does.

The engine's guarantees depend on some behaviour of SGLang, which the stand-in shares:
- Commands are handled in order, between two steps.
- A pause leaves requests in place or retracts them.
- Requests with the same salt share the prefix cache, which outlives the weights that computed it.
- Versions are recorded when they change.
- An abort matches ids by prefix.
- Without deterministic inference seeds are ignored. With it, all requests without a seed get the seed 42.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from penstock.trajectory import Sampling
from penstock.weights.folder_tensors import stop_token_ids
from penstock_rollout.engines.engine import GenerateRequest
from penstock_rollout.engines.torch.batch import DecodeBatch, Row
from support.sglang.plugins import Plugins

DEFAULT_SEED = 42
Message = dict[str, Any]
Kv = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(eq=False)
class Req:
    rid: str
    row: Row
    salt: str
    stream_interval: int
    return_sampling_mask: bool
    send: Callable[[Message], None]
    plain_log_probs: list[float] = field(default_factory=list)
    """Log-probs after temperature and before top-p. SGLang calls them the log-probs of a token."""
    version_events: list[tuple[str, int]] = field(default_factory=list)
    """For each version that ended: the version, and the number of tokens at that time."""
    num_sent: int = 0
    to_abort: bool = False


class PrefixBatch(DecodeBatch):
    """A decode batch with a prefix cache and with both kinds of log-prob."""

    def __init__(self, model: Any, stop_ids: frozenset[int], max_model_len: int, seed: int) -> None:
        super().__init__(model, stop_ids, max_model_len, seed)
        self.reqs: dict[Row, Req] = {}
        self.prefixes: dict[tuple[str, tuple[int, ...]], Kv] = {}

    def retract(self) -> list[Row]:
        """Remove all rows. Their KV stays in the prefix cache."""
        for index, row in enumerate(self.rows):
            length = len(row.tokens) - 1
            layers = self._cache.layers
            kv = [
                (layer.keys[index : index + 1, :, -length:], layer.values[index : index + 1, :, -length:])
                for layer in layers
            ]
            self._keep_prefix(row, [(keys.clone(), values.clone()) for keys, values in kv])
        return self.release()

    def _keep_prefix(self, row: Row, kv: Kv) -> None:
        self.prefixes[self.reqs[row].salt, tuple(row.tokens[:-1])] = kv

    def _prefill(self, rows: list[Row], version: int) -> None:
        for row in rows:
            self._prefill_one(row, version)

    def _prefill_one(self, row: Row, version: int) -> None:
        cache = DynamicCache()
        kept = self.prefixes.get((self.reqs[row].salt, tuple(row.tokens[:-1])))
        for layer, (keys, values) in enumerate(kept or ()):
            cache.update(keys.clone(), values.clone(), layer)
        new = row.tokens[-1:] if kept else row.tokens
        positions = torch.arange(len(row.tokens) - len(new), len(row.tokens))[None]
        logits = self._model(
            input_ids=torch.tensor([new]), position_ids=positions, past_key_values=cache, use_cache=True
        ).logits
        if not kept and len(row.tokens) > 1:
            self._keep_prefix(
                row, [(layer.keys[:, :, :-1].clone(), layer.values[:, :, :-1].clone()) for layer in cache.layers]
            )
        self._extend([row], logits[:, -1], version)
        self.rows.append(row)
        if self._cache is None:
            self._cache = cache
            return
        longest = max(self._cache.get_seq_length(), cache.get_seq_length())
        for mine, added in zip(self._cache.layers, cache.layers, strict=True):
            mine.keys = torch.cat([_pad(mine.keys, longest), _pad(added.keys, longest)])
            mine.values = torch.cat([_pad(mine.values, longest), _pad(added.values, longest)])

    def _draw(self, rows: list[Row], logits: torch.Tensor) -> tuple[list[int], list[float]]:
        token_ids, log_probs = super()._draw(rows, logits)
        temperatures = torch.tensor([row.request.sampling.temperature or 1.0 for row in rows])
        plain = (logits / temperatures[:, None]).log_softmax(dim=-1)
        for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
            self.reqs[row].plain_log_probs.append(float(plain[index, token_id]))
        return token_ids, log_probs


def _pad(states: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(states, (0, 0, length - states.shape[-2], 0))


class Scheduler(threading.Thread):
    """Owns the model. Everything but `submit` and `call` runs in this thread."""

    def __init__(
        self, folder: Path, *, max_running: int, max_len: int, seed: int, version: str, deterministic: bool
    ) -> None:
        super().__init__(name="scheduler", daemon=True)
        torch.set_num_threads(1)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        self.batch = PrefixBatch(self.model, frozenset(stop_token_ids(folder)), max_len, seed)
        self.version = version
        self.waiting: deque[Req] = deque()
        self.max_running = max_running
        self.max_len = max_len
        self.deterministic = deterministic
        self.is_paused = False
        self._inbox: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self.plugins = Plugins()
        self.plugins.scheduler_is_made(folder)

    def call(self, command: Callable[[], None]) -> None:
        """Run the command between two steps, after the commands that were sent before."""
        with self._changed:
            self._inbox.append(command)
            self._changed.notify()

    def new_req(self, body: dict[str, Any], send: Callable[[Message], None]) -> Req:
        params = body["sampling_params"]
        seed = params.get("sampling_seed")
        seed = (DEFAULT_SEED if seed is None else seed) if self.deterministic else None
        sampling = Sampling(
            temperature=params["temperature"], top_p=params["top_p"], top_k=params.get("top_k", 0),
            max_tokens=params["max_new_tokens"], ignore_eos=params.get("ignore_eos", False), seed=seed,
        )  # fmt: skip
        row = self.batch.new_row(GenerateRequest(body["rid"], tuple(body["input_ids"]), sampling))
        return Req(
            rid=body["rid"],
            row=row,
            salt=body.get("cache_salt") or "",
            stream_interval=params.get("stream_interval") or 1,
            return_sampling_mask=bool(body.get("return_sampling_mask")),
            send=send,
        )

    def submit(self, req: Req) -> None:
        self.call(lambda: self._add(req))

    def _add(self, req: Req) -> None:
        self.batch.reqs[req.row] = req
        self.waiting.append(req)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, timeout=1.0)
                commands = [self._inbox.popleft() for _ in range(len(self._inbox))]
            for command in commands:
                command()
            if not self.is_paused:
                self._step()

    def _has_work(self) -> bool:
        return bool(self._inbox) or (not self.is_paused and bool(self.waiting or self.batch.rows))

    def _step(self) -> None:
        stepped = [self.batch.reqs[row] for row in self.batch.rows]
        if stepped:
            self.batch.step(0)
        joining = [
            self.waiting.popleft() for _ in range(min(len(self.waiting), self.max_running - len(self.batch.rows)))
        ]
        if joining:
            self.batch.join([req.row for req in joining], 0)
        for req in stepped + joining:
            self._send(req)
        self.batch.drop_ended()

    def _send(self, req: Req) -> None:
        total = len(req.row.log_probs)
        unsent = total - req.num_sent
        finish = self._finish_reason(req)
        if finish is None and not (unsent >= req.stream_interval or (req.num_sent == 0 and unsent > 0)):
            return
        self._send_now(req, finish)

    def _finish_reason(self, req: Req) -> Message | None:
        if req.row.finish_reason == "stop":
            return {"type": "stop", "matched": req.row.tokens[-1]}
        if req.row.finish_reason == "length":
            return {"type": "length", "length": len(req.row.log_probs)}
        if req.to_abort:
            req.row.cancelled = True
            return {"type": "abort", "message": "Unknown error"}
        return None

    def _send_now(self, req: Req, finish: Message | None) -> None:
        """Send the new tokens only, as SGLang does with --incremental-streaming-output."""
        start, total = req.num_sent, len(req.row.log_probs)
        req.num_sent = total
        prompt = len(req.row.request.prompt_token_ids)
        ids = req.row.tokens[prompt + start : prompt + total]
        meta: Message = {
            "id": req.rid,
            "finish_reason": finish,
            "prompt_tokens": prompt,
            "weight_version": self.version,
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [
                [log_prob, token_id, None]
                for log_prob, token_id in zip(req.plain_log_probs[start:total], ids, strict=True)
            ],
            "output_token_logprobs_length": total,
            "reasoning_tokens": 0,
            "completion_tokens": total,
            "cached_tokens": 0,
        }
        if req.return_sampling_mask:
            meta["output_token_sampling_mask"] = [[token_id] for token_id in ids]
            meta["output_token_sampling_logprobs"] = req.row.log_probs[start:total]
            meta["output_token_sampling_mask_length"] = total
        if finish is not None:
            meta |= {"weight_versions": self._spans(req, total), "e2e_latency": 0.0}
            del self.batch.reqs[req.row]
        req.send({"output_ids": ids, "meta_info": meta})

    def _spans(self, req: Req, total: int) -> list[Message]:
        spans: list[Message] = []
        for version, end in [*req.version_events, (self.version, total)]:
            start = spans[-1]["end"] if spans else 0
            if not spans or end > start:
                spans.append({"version": version, "start": start, "end": end})
        return [span for span in spans if span["start"] < total or span["start"] == 0]

    def abort(self, rid: str, everything: bool) -> None:
        def matches(req: Req) -> bool:
            return everything or req.rid.startswith(rid)

        for req in [req for req in self.waiting if matches(req)]:
            self.waiting.remove(req)
            self._send_now(req, {"type": "abort", "message": "Abort in waiting queue"})
        for row in self.batch.rows:
            req = self.batch.reqs[row]
            req.to_abort = req.to_abort or matches(req)

    def pause(self, mode: str) -> None:
        self.is_paused = True
        if mode == "retract":
            self.waiting.extend(self.batch.reqs[row] for row in self.batch.retract())

    def resume(self) -> None:
        self.is_paused = False

    def load(self, folder: Path, version: str | None, flush_cache: bool) -> tuple[bool, str]:
        """Load weights, set the version and flush the cache, in SGLang's order. If the flush fails, the call fails, but
        weights and version have changed."""
        state = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in self.plugins.weights_of(folder):
                state[name].copy_(tensor)
        if version is not None and version != self.version:
            for req in self.batch.reqs.values():
                if req.row.log_probs:
                    req.version_events.append((self.version, len(req.row.log_probs)))
            self.version = version
        if flush_cache:
            if self.batch.rows:
                return False, "Weights were updated, but the cache was not flushed because requests are still running"
            self.batch.prefixes.clear()
        return True, "Succeeded to update model weights."

    def load_snapshot(self) -> Message:
        return {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": len(self.batch.rows),
            "num_waiting_reqs": len(self.waiting),
            "token_usage": min(1.0, self.batch.num_cached_tokens / (self.max_running * self.max_len)),
        }
