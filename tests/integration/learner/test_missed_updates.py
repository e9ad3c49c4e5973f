"""An engine that misses updates, or part of them, is found within a few steps, and let in again when it has them.

The engines are real and get their weights from snapshots. The learner is a model in this process, whose weights move a
little with each step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio as redis
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from penstock.config.rollout import EngineConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, Quarantines, ServerRecord
from penstock.trajectory import Group, Sampling, Trajectory
from penstock.v1 import policies_pb2
from penstock.weights.snapshot import write_snapshot
from penstock.weights.transports import TensorShape, build_manifest, host_checksum, weights_digest
from penstock_learner.agreement.servers import MIN_STEPS, LogProbCheck, ServerAgreement, ServerQuarantine
from penstock_learner.batches.sequence_batch import batch_of
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.causal_lm import load_model
from penstock_learner.term import Term
from penstock_rollout.engines.engine import GenerateRequest
from penstock_rollout.engines.torch.engine import TorchEngine
from penstock_rollout.fleet.membership import load_snapshot
from support.faults.faulty_server import Fault, FaultyEngine
from support.tiny_models import make_tiny_qwen2
from support.weight_buckets import packed_buckets

PROMPTS = [tuple(range(2 + 7 * n, 26 + 7 * n)) for n in range(4)]
STEP_SIZE = 0.002
"""How far every weight moves in a step, relative to its scale."""
FEW_STEPS = 6


class Learner:
    """The policy's model, and the snapshot of each of its versions."""

    def __init__(self, model_folder: Path, snapshots: Path) -> None:
        self.model = load_model(model_folder, torch.float32, chunk_tokens=64)
        self.snapshots = snapshots
        self.version = 0

    def train(self) -> policies_pb2.Policy:
        """Move the weights, and write them as the next version."""
        self.version += 1
        generator = torch.Generator().manual_seed(7)  # the same direction in every step
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=STEP_SIZE)
        return self._publish()

    def _publish(self) -> policies_pb2.Policy:
        weights = {name: p.detach().numpy() for name, p in self.model.lm.named_parameters()}
        shapes = [TensorShape(name, "F32", array.shape) for name, array in weights.items()]
        manifest = build_manifest("test", self.version, 1, shapes, bucket_bytes=1 << 20)
        buckets = packed_buckets(manifest, weights)
        checksums = [host_checksum(manifest.checksum, bucket) for bucket in buckets]
        folder = self.snapshots / f"version-{self.version}"
        write_snapshot(folder, manifest, buckets, checksums)
        return policies_pb2.Policy(
            policy_version=self.version, snapshot_path=str(folder), weights_digest=weights_digest(checksums)
        )

    async def policy_log_probs(self, groups: Sequence[Group]) -> NDArray[np.float32]:
        with torch.no_grad():
            found: NDArray[np.float32] = self.model(ModelInputs.of(batch_of(groups), torch.device("cpu")))[0].numpy()
        return found


class Setting:
    """A learner with a good and a faulty server, which sample the same prompts again and again."""

    def __init__(self, client: redis.Redis, term: int, learner: Any, engines: dict[str, TorchEngine]) -> None:
        self.learner = learner
        self.engines = engines
        self.quarantine = ServerQuarantine(Quarantines(client, "test"), term)
        metrics = LearnerMetrics(CollectorRegistry(), "standalone")
        self.agreement = ServerAgreement(
            LogProbCheck(0.1), self.quarantine, learner.policy_log_probs, Fleet(client, "test"), metrics, silence_s=600
        )
        self.step = 0
        self.next_id = 0

    async def sample(self, server: str) -> list[Group]:
        return [await self._group(server, prompt) for prompt in PROMPTS]

    async def _group(self, server: str, prompt: tuple[int, ...]) -> Group:
        self.next_id += 1
        number = self.next_id

        async def trajectory(index: int) -> Trajectory:
            request = GenerateRequest(f"{number}.{index}", prompt, Sampling(max_tokens=12))
            [chunk] = [chunk async for chunk in self.engines[server].generate(request)]
            return Trajectory(
                token_ids=np.array(chunk.token_ids, dtype=np.int32),
                loss_mask=np.ones(len(chunk.token_ids), dtype=np.uint8),
                log_probs=np.array(chunk.log_probs, dtype=np.float32),
                segments=chunk.segments,
                reward=0.0,
            )

        trajectories = await asyncio.gather(*(trajectory(index) for index in range(2)))
        return Group("test", number, 1, server, "", Sampling(), np.array(prompt, dtype=np.int32), tuple(trajectories))

    async def refused(self, groups: Sequence[Group]) -> set[str]:
        """Train a step on the groups. Returns the servers whose groups were refused."""
        self.step += 1
        refused = await self.agreement.refused(self.step, groups, Term(policy_version=self.learner.version))
        return {group.server_id for group in groups if group.prompt_id in refused}

    async def push(self, policy: policies_pb2.Policy) -> None:
        for server, engine in self.engines.items():
            if not self.quarantine.awaits_load(server):
                await load_snapshot(engine, policy, timeout_s=60)

    async def run_until_refused(self, *, lag: int, max_steps: int) -> int:
        """Train on samples that are `lag` steps old. Returns the number of steps until a server was refused."""
        waiting = [[group for server in self.engines for group in await self.sample(server)] for _ in range(lag + 1)]
        for step in range(1, max_steps + 1):
            if refused := await self.refused(waiting.pop(0)):
                assert refused == {"bad"}
                return step
            await self.push(self.learner.train())
            waiting.append([group for server in self.engines for group in await self.sample(server)])
        raise AssertionError(f"no server was refused in {max_steps} steps")


@asynccontextmanager
async def started(folder: Path, client: redis.Redis, term: int, fault: Fault, is_faulty: Any) -> AsyncIterator[Setting]:
    model = make_tiny_qwen2(folder / "model", seed=3)
    config = EngineConfig(name="torch", max_model_len=64)
    engines: dict[str, TorchEngine] = {"good": TorchEngine(config, model, "float32", 1)}
    engines["bad"] = bad = FaultyEngine(config, model, "float32", 2)
    bad.fault, bad.is_faulty = fault, is_faulty
    async with AsyncExitStack() as stack:
        for name, engine in engines.items():
            await engine.start(policy_version=0)
            stack.push_async_callback(engine.stop)
            await Fleet(client, "test").join(ServerRecord(name, "127.0.0.1:1", "torch"))
        setting = Setting(client, term, Learner(model, folder), engines)
        await setting.agreement.begin()
        yield setting


@pytest.mark.parametrize(
    ("fault", "lag"),
    [("frozen", 0), ("layer", 0), ("stale_kv", 0)]
    + [pytest.param(*case, marks=pytest.mark.long) for case in [("frozen", 1), ("layer", 1), ("stale_kv", 1)]],
)
async def test_a_missed_update_is_found_within_a_few_steps(
    fault: Fault, lag: int, tmp_path: Path, redis_client: redis.Redis, queue: RedisReplayQueue, record_property: Any
) -> None:
    """Every push reports success and the right digest."""
    broken = [False]
    async with started(tmp_path, redis_client, await queue.take_term(0), fault, lambda: broken[0]) as setting:
        for _ in range(MIN_STEPS + lag):
            assert await setting.refused(await setting.sample("good") + await setting.sample("bad")) == set()
            await setting.push(setting.learner.train())
        broken[0] = True
        num_steps = await setting.run_until_refused(lag=lag, max_steps=FEW_STEPS * (1 + lag))
        record_property("steps until the quarantine", num_steps)


async def test_an_engine_that_has_its_weights_again_is_let_in(
    tmp_path: Path, redis_client: redis.Redis, queue: RedisReplayQueue
) -> None:
    broken = [True]
    async with started(tmp_path, redis_client, await queue.take_term(0), "frozen", lambda: broken[0]) as setting:
        for _ in range(2):
            await setting.refused(await setting.sample("good"))
            policy = setting.learner.train()
            await setting.push(policy)
        await setting.run_until_refused(lag=0, max_steps=FEW_STEPS)

        async def probe(policy: policies_pb2.Policy) -> set[str]:
            """Load the version wholly, sample, and compare, as the learner and the queue do."""
            await load_snapshot(setting.engines["bad"], policy, timeout_s=60)
            await setting.quarantine.loaded("bad", policy.policy_version)
            groups = await setting.sample("bad")
            record = setting.quarantine.records["bad"]
            ids = frozenset(group.prompt_id for group in groups)
            await setting.quarantine.store.put(replace(record, probes_left=0, probe_ids=ids), setting.quarantine.term)
            return await setting.refused(groups)

        policy = setting.learner.train()
        assert await probe(policy) == {"bad"}, "the same fault again"
        broken[0] = False
        assert await probe(policy) == set()
        assert await setting.quarantine.store.read() == {}
        await setting.push(setting.learner.train())
        assert await setting.refused(await setting.sample("good") + await setting.sample("bad")) == set()
