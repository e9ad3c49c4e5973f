"""Fixtures of the tests with real SDKs: one run for all of them, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import openai

    from protocol_run import ProtocolRun


@pytest.fixture(scope="session")
def served_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProtocolRun]:
    """It has a Redis of its own, because other tests empty the shared one."""
    from conftest import RedisProcess
    from protocol_run import protocol_run

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
