"""Tries group speculation: siblings of a group draft each other's tokens, and one forward pass verifies a draft.

    .venv/bin/python bench/group_speculation.py MODEL_FOLDER DATA.parquet

The last tokens of a sample are looked up in its siblings' tokens and in its own; what followed there is the draft. A
draft is deterministic, so drawing from the model's distribution and keeping the draft while it agrees is exact: the
samples are those without speculation, which is checked. Siblings start together, as in a run, or the first of a group
goes ahead and the others start when it has ended. On a CPU, speed is tokens for a second of one core, so that other
work on the machine does not matter; with `--device cuda` it is tokens a second.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from harness import Bar, Measurement, alternate, ratios, report

NUM_SAMPLES, MAX_TOKENS = 8, 8
SUFFIX_TOKENS = (3, 2, 1)
"""Lengths of the suffix that is looked up, the longest first."""
DRAFT_TOKENS = 4
NUM_ROUNDS = 5
EQUAL_GOAL = 0.995
"""Less than 1, because the products of a pass with drafts are summed in another order, and a draw can be that close."""
MODES = {"no drafts": (False, False), "siblings together": (True, False), "one sibling ahead": (True, True)}
"""Whether to draft, and whether one sibling goes ahead."""


@dataclass(eq=False)
class Row:
    """One sample. Its noise decides its tokens, whatever is drafted."""

    prompt: list[int]
    noise: torch.Tensor
    """It has the logarithm of a race of exponentials for each token: [MAX_TOKENS, vocabulary]."""
    response: list[int] = field(default_factory=list)
    is_finished: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.response


@dataclass
class Counts:
    num_passes: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    seconds: float = 0.0


def find_draft(seen: Sequence[int], sources: Sequence[Sequence[int]]) -> list[int]:
    """What followed the longest suffix of `seen` in a source, where it occurs last."""
    for length in SUFFIX_TOKENS:
        suffix = list(seen[-length:])
        for source in sources:
            for start in range(len(source) - length - 1, -1, -1):
                if list(source[start : start + length]) == suffix:
                    return list(source[start + length : start + length + DRAFT_TOKENS])
    return []


class Decoder:
    """Decodes groups in one batch of at most `max_rows`. The cache is left-padded, as the torch engine's."""

    def __init__(self, model: Any, stop_id: int, groups: list[list[Row]], max_rows: int, mode: str) -> None:
        self._model = model
        self._device = model.device
        self._stop_id = stop_id
        self._drafts, one_ahead = MODES[mode]
        self._siblings = {id(row): group for group in groups for row in group}
        self._followers = {id(group[0]): group[1:] for group in groups} if one_ahead else {}
        self._waiting = deque(row for group in groups for row in (group[:1] if one_ahead else group))
        self._max_rows = max_rows
        self._rows: list[Row] = []
        self._cache: Any = None
        self.counts = Counts()

    @torch.inference_mode()
    def run(self) -> None:
        clock = time.perf_counter if self._device.type == "cuda" else time.process_time
        started = clock()
        while self._rows or self._waiting:
            num_joining = min(len(self._waiting), self._max_rows - len(self._rows))
            if joining := [self._waiting.popleft() for _ in range(num_joining)]:
                self._prefill(joining)
            self._step()
        self.counts.seconds = clock() - started

    def _prefill(self, rows: list[Row]) -> None:
        """Compute the KV of all tokens of the prompts but the last. All prompts have the same length."""
        cache = DynamicCache()
        self._model(input_ids=self._tensor([row.prompt[:-1] for row in rows]), past_key_values=cache, use_cache=True)
        self._rows += rows
        if self._cache is None:
            self._cache = cache
            return
        for mine, new in zip(self._cache.layers, cache.layers, strict=True):
            room = (0, 0, mine.keys.shape[2] - new.keys.shape[2], 0)
            mine.keys = torch.cat([mine.keys, torch.nn.functional.pad(new.keys, room)])
            mine.values = torch.cat([mine.values, torch.nn.functional.pad(new.values, room)])

    def _step(self) -> None:
        drafts = [self._draft_of(row) if self._drafts else [] for row in self._rows]
        width = 1 + max(map(len, drafts))
        padded = [draft + [0] * (width - 1 - len(draft)) for draft in drafts]
        fed = self._tensor([[row.tokens[-1], *draft] for row, draft in zip(self._rows, padded, strict=True)])
        lengths = self._tensor([len(row.tokens) for row in self._rows])
        num_cached = self._cache.get_seq_length()
        columns = torch.arange(num_cached + width, device=self._device)
        logits = self._model(
            input_ids=fed,
            position_ids=lengths[:, None] - 1 + torch.arange(width, device=self._device),
            attention_mask=(columns >= num_cached + 1 - lengths[:, None]).long(),
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        num_kept = []
        for row, draft, row_logits in zip(self._rows, drafts, logits.log_softmax(-1).cpu(), strict=True):
            num_kept.append(self._extend(row, draft, row_logits))
        self._keep_cache(width, num_kept)

    def _tensor(self, values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, device=self._device)

    def _draft_of(self, row: Row) -> list[int]:
        siblings = sorted(self._siblings[id(row)], key=lambda other: (other is row, -len(other.response)))
        room = MAX_TOKENS - len(row.response) - 1
        return find_draft(row.tokens, [other.tokens for other in siblings])[:room]

    def _extend(self, row: Row, draft: list[int], log_probs: torch.Tensor) -> int:
        """Add the tokens that were drawn, up to the first that the draft did not have. Returns how many."""
        done = len(row.response)
        drawn = (log_probs[: len(draft) + 1] - row.noise[done : done + len(draft) + 1]).argmax(-1).tolist()
        num_new = 0
        for token in drawn:
            row.response.append(token)
            num_new += 1
            row.is_finished = token == self._stop_id or len(row.response) == MAX_TOKENS
            if row.is_finished or num_new > len(draft) or token != draft[num_new - 1]:
                break
        counts = self.counts
        counts.num_passes += 1
        counts.num_tokens += num_new
        counts.num_drafted += len(draft)
        counts.num_accepted += sum(a == b for a, b in zip(drawn[:num_new], draft, strict=False))
        if row.is_finished:
            self._waiting.extendleft(self._followers.pop(id(row), []))
        return num_new

    def _keep_cache(self, width: int, num_kept: list[int]) -> None:
        """Drop the KV of drafts that were refused and of rows that ended, and align the rest to the right."""
        indices = [index for index, row in enumerate(self._rows) if not row.is_finished]
        self._rows = [self._rows[index] for index in indices]
        if not self._rows:
            self._cache = None
            return
        longest = max(len(row.tokens) for row in self._rows) - 1
        chosen = self._tensor(indices)
        num_dropped = width - self._tensor(num_kept)[chosen]
        for layer in self._cache.layers:
            total = layer.keys.shape[2]
            columns = (torch.arange(total - longest, total, device=self._device) - num_dropped[:, None]).clamp(min=0)
            where = columns[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
            layer.keys, layer.values = layer.keys[chosen].gather(2, where), layer.values[chosen].gather(2, where)


def make_groups(prompts: list[list[int]], vocab_size: int) -> list[list[Row]]:
    generator = torch.Generator().manual_seed(0)
    noise = torch.empty(len(prompts), NUM_SAMPLES, MAX_TOKENS, vocab_size).exponential_(generator=generator).log()
    return [[Row(prompt, row) for row in rows] for prompt, rows in zip(prompts, noise, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256], help="rows of a batch, at most")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(arguments.model).to(arguments.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows = pq.read_table(arguments.data).slice(0, arguments.prompts).to_pylist()
    encoded = [tokenizer.encode(row["prompt"][0]["content"]) for row in rows]
    prompts = [prompt for prompt in encoded if len(prompt) == len(encoded[0])]
    found: list[Measurement] = []
    bars: list[Bar] = []
    for max_rows in arguments.rows:
        figures, bar = compare(model, tokenizer.eos_token_id, prompts, max_rows)
        found += figures
        bars.append(bar)
    name = "group_speculation_gpu" if model.device.type == "cuda" else "group_speculation"
    return 0 if report(name, f"group speculation, {model.device.type}", found, bars) else 1


def compare(model: Any, stop_id: int, prompts: list[list[int]], max_rows: int) -> tuple[list[Measurement], Bar]:
    """Decode the same samples in all modes, in turn. Returns the figures of each, and the share of samples that drafts
    left as they were."""
    counts: dict[str, Counts] = {}
    samples: dict[str, list[list[int]]] = {}

    def decode(mode: str) -> float:
        groups = make_groups(prompts, model.config.vocab_size)
        decoder = Decoder(model, stop_id, groups, max_rows, mode)
        decoder.run()
        samples[mode], counts[mode] = [row.response for group in groups for row in group], decoder.counts
        return decoder.counts.num_tokens / decoder.counts.seconds

    speeds = alternate({mode: partial(decode, mode) for mode in MODES}, NUM_ROUNDS, "tokens/s")
    plain, *drafted = MODES
    found = [replace(each, name=f"{max_rows} rows, {mode}: tokens a second") for mode, each in speeds.items()]
    for mode in drafted:
        label, made = f"{max_rows} rows, {mode}", counts[mode]
        found += [
            ratios(f"{label}: speed / {plain}", speeds[mode], speeds[plain]),
            Measurement(f"{label}: drafted tokens that were accepted", "", [made.num_accepted / made.num_drafted]),
            Measurement(f"{label}: tokens a pass", "", [made.num_tokens / made.num_passes]),
        ]
    num_equal = sum(mine == base for mode in drafted for mine, base in zip(samples[mode], samples[plain], strict=True))
    share = num_equal / (len(drafted) * len(samples[plain]))
    return found, Bar(f"{max_rows} rows: samples that are those without drafts", share, EQUAL_GOAL)


if __name__ == "__main__":
    sys.exit(main())
