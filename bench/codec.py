"""Compares two encodings of a group: our frame (protobuf with raw arrays, zstd-1, checksum) and JSON of the same data.

make bench-codec
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable

import numpy as np

from harness import Bar, alternate, make_parser, median_ratio, report, sized
from penstock.codec import decode_group, encode_group
from penstock.trajectory import Group, Sampling, Trajectory, VersionSegment

NUM_SAMPLES = 8
NUM_TOKENS = sized(1024, 768)
NUM_ROUNDS = sized(7, 1)
BUDGET_S = sized(0.5, 0.01)


def make_group() -> Group:
    """Eight samples of 1,024 tokens, like those of a reasoning model: ids of a 150k vocabulary, log-probs near 0."""
    random = np.random.default_rng(0)
    trajectories = tuple(
        Trajectory(
            token_ids=random.integers(0, 150_000, NUM_TOKENS).astype(np.int32),
            loss_mask=np.ones(NUM_TOKENS, dtype=np.uint8),
            log_probs=-random.exponential(0.3, NUM_TOKENS).astype(np.float32),
            segments=(VersionSegment(0, 700, 3), VersionSegment(700, NUM_TOKENS, 4)),
            reward=1.0,
        )
        for _ in range(NUM_SAMPLES)
    )
    prompt = random.integers(0, 150_000, 200).astype(np.int32)
    return Group("bench", 1, 1, "rollout-0", "bench", Sampling(), prompt, trajectories)


def to_json(group: Group) -> bytes:
    def plain(value: object) -> object:
        return value.tolist() if isinstance(value, np.ndarray) else value

    fields = dataclasses.asdict(group)
    for trajectory in fields["trajectories"]:
        trajectory |= {key: plain(value) for key, value in trajectory.items()}
    fields["prompt_token_ids"] = plain(fields["prompt_token_ids"])
    return json.dumps(fields).encode()


def rate_of(call: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < BUDGET_S:
            call()
            count += 1
        return count / (time.perf_counter() - started)

    return run


def main() -> int:
    make_parser().parse_args()
    group = make_group()
    framed, text = encode_group(group), to_json(group)
    measured = alternate(
        {
            "encode, ours": rate_of(lambda: encode_group(group)),
            "encode, JSON": rate_of(lambda: to_json(group)),
            "decode and check, ours": rate_of(lambda: decode_group(framed)),
            "decode, JSON": rate_of(lambda: json.loads(text)),
        },
        NUM_ROUNDS,
        "groups/s",
    )
    bars = [
        Bar("bytes of JSON / ours", len(text) / len(framed), 3.0),
        Bar("encode, ours / JSON", median_ratio(measured["encode, ours"], measured["encode, JSON"]), 10.0),
        Bar(
            "decode and check, ours / JSON",
            median_ratio(measured["decode and check, ours"], measured["decode, JSON"]),
            10.0,
        ),
    ]
    title = f"one group: {NUM_SAMPLES} samples of {NUM_TOKENS} tokens; ours {len(framed):,} bytes, JSON {len(text):,}"
    return 0 if report("codec", title, list(measured.values()), bars) else 1


if __name__ == "__main__":
    raise SystemExit(main())
