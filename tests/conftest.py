"""Fixtures that start real components. Each ends what it started, by process id."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis.asyncio as redis
from hypothesis import settings

# Some tests run makers of pages and schemas in this process.
os.environ["PENSTOCK_DESCRIBE_CONFIG"] = "1"

from penstock.config.service import RedisConfig, ReplayConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.store.redis_client import connect
from support.redis_server import RedisProcess

if TYPE_CHECKING:
    from support.gateways import Gateway

# Every run of a test has a new folder. vLLM would look into the same model for 10 s in each of them.
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
# Processes that tests start import tests/support as tests do.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
# The built-in sandbox forks, in the product from a process without gRPC. Where gRPC has threads, its fork handlers
# would end the child.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# A busy machine must not fail a property test. `make test` draws the same examples each time, so that it judges the
# change and not the luck of a draw; `make test-long` draws new ones.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None)
settings.load_profile("same")


pytest_plugins = ("support.fixtures", "support.faults.matrix_results", "support.quarantine")
STARTS_VLLM = (
    "test_engine_conformance.py", "test_engine_load.py", "test_constrained_output.py", "test_vllm_flips.py",
    "test_vllm_models.py",
)  # fmt: skip
SLOW_FILES = (
    "test_learner_run.py",
    "test_bench_smoke.py",
    "test_demo.py",
    "test_doc_commands.py",
    "test_live_run.py",
    "test_attacks.py",
    "test_generate.py",
    "test_script_faults.py",
    "test_feeding.py",
    "test_sglang_engine.py",
    "test_rolling_upgrade.py",
    "test_gateway_fuzz.py",
    "test_step_variants.py",
    "test_scorer.py",
    "test_chart_processes.py",
    "test_console.py",
    "test_standby_engine.py",
    "test_weight_transports.py",
    "test_gateway_restart.py",
    "test_architectures.py",
    "test_start_checks.py",
    "test_relayed_push.py",
    "test_replay_properties.py",
    "test_role_group.py",
    "test_sft_training.py",
    "test_missed_updates.py",
    "test_launcher.py",
    "test_linearizability.py",
    "test_gateway_api_page.py",
    "test_monitoring.py",
    "test_chart_options.py",
    "test_compiled_code.py",
    "test_split_invariance.py",
)
"""Files that take longest in `make test`, the slowest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that start vLLM first. vLLM on CPU forks its engine from this process, and the fork does not
    survive threads that torch has started. The slow files follow, so that no worker is left with one at the end.
    Every worker must have the same order."""

    def place(item: pytest.Item) -> tuple[bool, bool, int]:
        name = item.path.name
        slow = SLOW_FILES.index(name) if name in SLOW_FILES else len(SLOW_FILES)
        return name not in STARTS_VLLM, name in STARTS_VLLM and "vllm" not in item.nodeid, slow

    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path)
    items.sort(key=place)


def begin_elsewhere(config: pytest.Config) -> None:
    """Let each worker begin its collection with other files. In a new clone a test file is compiled with rewritten
    assertions, a third of the time of collection. The others then find what the first has compiled."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if not worker or config.args != config.getini("testpaths"):
        return
    left_out = {Path(path).resolve() for path in config.getoption("ignore") or ()}
    files = [str(path) for path in sorted(Path(__file__).parent.rglob("test_*.py")) if path.resolve() not in left_out]
    start = len(files) * int(worker.removeprefix("gw")) // count
    config.args[:] = files[start:] + files[:start]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collection imports hundreds of thousands of objects that stay. The search for garbage among them would take a
    tenth of its time."""
    begin_elsewhere(session.config)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def the_log_of_a_test_ends_with_it() -> Iterator[None]:
    """A command that a test calls here logs to the stderr of this test, which is closed when the test has ended."""
    root = logging.getLogger()
    level = root.level
    yield
    root.handlers[:] = [handler for handler in root.handlers if type(handler) is not logging.StreamHandler]
    root.setLevel(level)


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone, for role workers without Ray."""
    from support.learner_ranks import one_rank_world

    with one_rank_world():
        yield


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a tiny policy and a tiny sequence classifier. Do not write to them."""
    from support.tiny_models import make_tiny_classifier, make_tiny_qwen2

    root = tmp_path_factory.mktemp("tiny-models")
    return {"policy": make_tiny_qwen2(root / "policy", seed=5), "scalar": make_tiny_classifier(root / "scalar", seed=6)}


@pytest.fixture
async def redis_client(redis_process: RedisProcess) -> AsyncIterator[redis.Redis]:
    client = connect(RedisConfig(url=redis_process.url, timeout_s=200))  # Redis is not what is tested
    await client.flushdb()
    yield client
    await client.aclose()


@pytest.fixture
def queue(redis_client: redis.Redis) -> RedisReplayQueue:
    """A small queue: 2 groups per step, staleness 1, three attempts. No test is so slow that a lease expires."""
    return RedisReplayQueue(
        redis_client, "test", ReplayConfig(groups_per_step=2, max_staleness=1, max_attempts=3, lease_ttl_s=600)
    )


@pytest.fixture
async def gateway(redis_process: RedisProcess, redis_client: redis.Redis, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway on real ports, with a tokenizer and without keys."""
    from support.gateways import run_config, running
    from support.scripted_engines import make_tokenizer_folder

    make_tokenizer_folder(tmp_path)
    async with running(run_config(redis_process.url, tmp_path)) as started:
        yield started
