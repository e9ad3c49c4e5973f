"""Fixtures that start real components for several rooms. Each ends what it started, by process id.

Imports of components are inside the fixtures, because every test session loads this module.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio as redis
from filelock import FileLock

if TYPE_CHECKING:
    import openai

    from support.faults.matrix_run import FaultFree, MatrixRun
    from support.gateways import Gateway
    from support.protocol_run import ProtocolRun
    from support.scripted_engines import TalkingEngine


MakeRun = Callable[..., "MatrixRun"]


@pytest.fixture(scope="session")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> FaultFree:
    return _trained_once(tmp_path_factory, num_ranks=1)


@pytest.fixture(scope="session")
def fault_free_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> FaultFree:
    return _trained_once(tmp_path_factory, num_ranks=2)


def _trained_once(factory: pytest.TempPathFactory, num_ranks: int) -> FaultFree:
    """Train without faults, in one of the processes of pytest-xdist. The others wait for its result."""
    from support.faults.matrix_run import FaultFree, run_without_faults

    own = factory.getbasetemp()
    shared = own.parent if own.name.startswith("popen-") else own
    found = shared / f"fault-free-{num_ranks}.json"
    with FileLock(str(found) + ".lock", timeout=600):
        if not found.exists():
            trained = run_without_faults(factory.mktemp("fault-free"), num_ranks)
            found.write_text(json.dumps(trained.state_hashes))
    return FaultFree({int(step): value for step, value in json.loads(found.read_text()).items()})


@pytest.fixture
def make_run(tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[MakeRun]:
    """Makes the run of a test. Its measurements become the test's row of the matrix."""
    from support.faults.matrix_run import MatrixRun

    runs: list[MatrixRun] = []
    with ExitStack() as ending:

        def make(**options: Any) -> MatrixRun:
            runs.append(ending.enter_context(MatrixRun(tmp_path / f"run-{len(runs)}", **options)))
            return runs[-1]

        yield make
    for run in runs:
        measured = asdict(run.measured)
        for row in run.rows or [{}]:
            record_property("fault", measured | row)


@pytest.fixture(scope="session")
def served_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProtocolRun]:
    """It has a Redis of its own, because other tests empty the shared one."""
    from support.protocol_run import protocol_run
    from support.redis_server import RedisProcess

    redis = RedisProcess(tmp_path_factory.mktemp("protocol-redis"))
    redis.start()
    try:
        with protocol_run(redis.url, tmp_path_factory.mktemp("protocol-run")) as run:
            yield run
    finally:
        redis.kill()


@pytest.fixture(scope="session")
def openai_client(served_run: ProtocolRun) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{served_run.url}/v1", api_key=served_run.key, max_retries=0) as client:
        yield client


NUM_SERVERS = 4


@pytest.fixture
async def talking(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path
) -> AsyncIterator[tuple[Gateway, dict[str, TalkingEngine]]]:
    from penstock.config.run import WeightsConfig
    from penstock.config.service import SessionLimits
    from support.gateways import run_config, running
    from support.scripted_engines import TalkingEngine, make_tokenizer_folder, serving

    make_tokenizer_folder(tmp_path)
    (tmp_path / "cluster-key").write_text("secret")
    config = run_config(redis_process.url, tmp_path, sessions=SessionLimits(task_lease_s=600)).model_copy(
        update={"weights": WeightsConfig(cluster_key_file=tmp_path / "cluster-key")}
    )
    engines = {f"r{number}": TalkingEngine() for number in range(NUM_SERVERS)}
    async with serving(config, redis_client, tmp_path, engines), running(config) as gateway:
        yield gateway, engines
