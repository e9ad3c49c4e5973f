"""Tests of the flip inside vLLM's EngineCore that the conformance suite cannot ask of every engine."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.config.rollout import EngineConfig
from penstock.errors import ConfigError, Unavailable, WeightPushFailed
from penstock.trajectory import Sampling
from penstock_rollout.engines.vllm import start
from penstock_rollout.engines.vllm.engine import VllmEngine
from support.served_engines import (
    DEADLINE_S,
    LONG,
    MAX_MODEL_LEN,
    Publisher,
    Push,
    Served,
    assert_log_probs,
    hold_decoding,
    load_model,
    write_qwen2,
)
from support.tiny_models import VOCAB_SIZE

pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

PROMPT = tuple(2 + index % (VOCAB_SIZE - 2) for index in range(480))
FEW = Sampling(max_tokens=8)


@asynccontextmanager
async def serving(
    folder: Path, profile_versions: tuple[int, ...] = (), **extra: Any
) -> AsyncIterator[tuple[Served, VllmEngine]]:
    write_qwen2(folder)
    config = EngineConfig(
        name="vllm", max_model_len=MAX_MODEL_LEN, max_num_seqs=8, extra=extra, profile_versions=profile_versions
    )
    engine = VllmEngine(config, folder, "float32", seed=0, profiles=folder / "profiles")
    await engine.start(policy_version=5)
    try:
        yield Served(engine, load_model(folder)), engine
    finally:
        await engine.stop()


async def test_requests_without_a_token_use_nothing_of_the_old_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the part of their prompt that was computed, nor cached prefixes if they arrive late with the old salt."""
    from vllm.v1.core.sched.scheduler import Scheduler

    brake, schedule = tmp_path / "brake", Scheduler.schedule

    def schedule_slowly(self: Any, *arguments: Any, **settings: Any) -> Any:
        """The prompt needs 60 steps. With a pause in each of them it is still being computed when it is held."""
        if brake.exists():
            time.sleep(0.1)
        return schedule(self, *arguments, **settings)

    monkeypatch.setattr(Scheduler, "schedule", schedule_slowly)  # EngineCore is forked from this process
    async with serving(tmp_path / "model", enable_chunked_prefill=True, max_num_batched_tokens=8) as (served, engine):
        brake.touch()
        begun = asyncio.ensure_future(served.answer(PROMPT, FEW))
        async with asyncio.timeout(DEADLINE_S):
            while engine.stats().kv_cache_usage == 0:
                await asyncio.sleep(0.001)
        await hold_decoding(engine)
        brake.unlink()
        assert not begun.done()
        salt = (engine.policy_version, engine._num_loads)
        version = await served.update(served.next_model())
        answer = await begun
        assert set(answer.versions) == {version}
        assert_log_probs(served.model, answer)

        await served.answer(PROMPT[::-1], FEW)
        old = engine.policy_version, engine._num_loads
        version = await served.update(served.next_model())
        new, (engine.policy_version, engine._num_loads) = (engine.policy_version, engine._num_loads), old
        assert salt < old < new
        late = asyncio.ensure_future(served.answer(PROMPT[::-1], FEW))
        await asyncio.sleep(0)
        engine.policy_version, engine._num_loads = new
        assert set((await late).versions) == {version}
        assert_log_probs(served.model, await late)


async def test_a_load_that_fails_ends_all_requests_and_stops_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock_rollout.engines.vllm.core import WeightStaging

    def fail(worker: Any) -> None:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(WeightStaging, "penstock_commit", fail)  # EngineCore is forked from this process
    async with serving(tmp_path) as (served, engine):
        push = Push.of(served.next_model(), 6)
        publisher = Publisher(push)
        await engine.stage_weights(publisher.announcement())
        publisher.start()
        streams = [served.chunks((3, 4, 2 + index), LONG) for index in range(4)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        rests = [asyncio.ensure_future(_last_reason(stream)) for stream in streams]
        with pytest.raises(WeightPushFailed, match="no memory is left; restart the rollout server"):
            await engine.commit_weights(6, push.checksums, timeout_s=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            assert set(await asyncio.gather(*rests)) == {"aborted"}
        assert engine.policy_version == 5
        with pytest.raises(Unavailable, match="loading version 6 failed"):
            await engine.check_health()
        with pytest.raises(Unavailable):
            await served.answer((3,), LONG)


async def test_chosen_versions_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace is written after PROFILED_STEPS, or before the next version is loaded."""
    monkeypatch.setattr(start, "PROFILED_STEPS", 4)

    async def answer(num_tokens: int) -> list[str]:
        await served.answer((3, 4), Sampling(max_tokens=num_tokens, ignore_eos=True))
        return sorted(path.name.partition("_")[0] for path in (tmp_path / "profiles").glob("*.json.gz"))

    async with serving(tmp_path, profile_versions=(5, 7)) as (served, _):
        assert await answer(2) == []
        assert await answer(8) == ["version-5"]
        assert await served.update(served.next_model()) == 6
        assert await answer(8) == ["version-5"]
        assert await served.update(served.next_model()) == 7
        assert await answer(2) == ["version-5"]
        assert await served.update(served.next_model()) == 8
        assert await answer(8) == ["version-5", "version-7"]
    for path in (tmp_path / "profiles").glob("*.json.gz"):
        with gzip.open(path) as file:
            assert any(event["name"].startswith("aten::") for event in json.load(file)["traceEvents"])


async def test_a_profile_that_fails_does_not_end_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, profile_versions=(6, 7), profiler_config={}) as (served, _):
        assert await served.update(served.next_model()) == 6
        await served.check_serves(6)
        assert "the profile of version 6 failed: " in caplog.text


async def _last_reason(chunks: AsyncIterator[Any]) -> str | None:
    reason = None
    async for chunk in chunks:
        reason = chunk.finish_reason
    return reason


async def test_versions_after_the_first_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM multiplies with packed weights. Here it does not, as on a GPU."""
    from vllm.model_executor.layers import utils

    from penstock_rollout.engines.vllm import core
    from support.vllm_models import leave_unpacked

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", leave_unpacked)
    monkeypatch.setattr(core, "COPYING_DEVICES", ("cpu",))
    load, copied = core.Copies.load, tmp_path / "copied"

    def loaded(self: core.Copies, tensors: core.NamedTensors) -> None:
        load(self, tensors)
        with copied.open("a") as file:
            file.write("1")

    monkeypatch.setattr(core.Copies, "load", loaded)
    async with serving(tmp_path / "model") as (served, engine):
        for num_copied in range(3):
            chunks = served.chunks((3, 4, 5), LONG)
            await anext(chunks)
            version = await served.update(served.next_model())
            await chunks.aclose()
            await served.check_serves(version)
            assert (copied.read_text() if copied.exists() else "") == num_copied * "1"


@pytest.mark.parametrize(
    "extra",
    [
        {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"},
        {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
    ],
)
async def test_what_a_flip_needs_cannot_be_replaced(tmp_path: Path, extra: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=rf"rollout.engine.extra sets {next(iter(extra))}, .*; remove it"):
        async with serving(tmp_path, **extra):
            pass
