"""A rollout server whose samples depend on the prompt alone: `python -m support.faults.steady_server --config …`.

Only `generate` is replaced. Leases, rewards, appends, weight pushes and the listener are those of penstock_rollout. Two
runs over the same prompts therefore train on the same data, whatever happened to their servers, and must end in the
same weights.

| variable | meaning |
|---|---|
| STEADY_SAMPLE_S | seconds that a sample takes |
| STEADY_BROKEN_FILE | while this file exists, log-probs are NaN |
| STEADY_STORE_VIA | port of a proxy through which this server reaches the learner's rendezvous |
| STEADY_STORE_FILE | file to which the server writes the address of that rendezvous, for the proxy |
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.trajectory import VersionSegment
from penstock_rollout import __main__ as rollout_process
from penstock_rollout import server as rollout_server
from penstock_rollout.engines.engine import GenerateRequest, TokenChunk
from penstock_rollout.engines.torch.engine import TorchEngine
from penstock_rollout.weights.receivers import gloo

SAMPLE_S = "STEADY_SAMPLE_S"
BROKEN_FILE = "STEADY_BROKEN_FILE"
STORE_VIA = "STEADY_STORE_VIA"
STORE_FILE = "STEADY_STORE_FILE"
END_TOKEN, VOCAB_SIZE = 1, 32


class SteadyEngine(TorchEngine):
    """The torch engine, with made-up tokens."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        await self.check_health()
        await asyncio.sleep(float(os.environ.get(SAMPLE_S, "0")))
        sample = int(request.request_id.split(".")[2])  # the id is PROMPT.ATTEMPT.SAMPLE.TURN
        random = np.random.default_rng((sample, *request.prompt_token_ids))
        length = int(random.integers(2, 7))
        token_ids = (*random.integers(2, VOCAB_SIZE, length - 1).tolist(), END_TOKEN)
        log_probs = tuple(np.round(-random.uniform(2.0, 4.0, length), 3).tolist())
        if Path(os.environ.get(BROKEN_FILE, "/nonexistent")).exists():
            log_probs = (float("nan"),) * length
        yield TokenChunk(token_ids, log_probs, (VersionSegment(0, length, self.policy_version),), "stop")


def create_engine(config: Any, model_path: Path, dtype: str, seed: int, **_: Any) -> SteadyEngine:
    return SteadyEngine(config, model_path, dtype, seed)


def through_proxy(port: int, told: Path) -> Any:
    """A `parse_rendezvous` that names the proxy, and tells the proxy the real address."""
    parse = gloo.parse_rendezvous

    def parsed(rendezvous: str) -> tuple[str, int, str, int]:
        host, real_port, *others = parse(rendezvous)
        beside = told.with_suffix(".new")
        beside.write_text(f"{host}:{real_port}")
        beside.rename(told)
        return "127.0.0.1", port, others[0], others[1]

    return parsed


def main() -> int:
    rollout_server.create_engine = create_engine  # type: ignore[assignment]
    if STORE_VIA in os.environ:
        gloo.parse_rendezvous = through_proxy(int(os.environ[STORE_VIA]), Path(os.environ[STORE_FILE]))
    return rollout_process.main()


if __name__ == "__main__":
    raise SystemExit(main())
