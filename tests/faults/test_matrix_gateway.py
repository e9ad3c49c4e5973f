"""Rows of the fault matrix: what happens to the gateway, its links, and the feed. No prompt is lost or doubled."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from penstock.api_keys import read_own_key
from penstock.client import SyncPenstockClient
from penstock.machine import free_port, wait_for_port
from penstock.replay.queue import RedisReplayQueue
from penstock.trajectory import Prompt
from support.faults.matrix_run import GROUPS_PER_STEP, NUM_STEPS, MatrixRun, make_faults
from support.faults.proxy import ProxyThread
from support.fixtures import MakeRun

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
AREA = "gateway and feed"
NUM_CLIENTS = 4
PROMPTS_PER_SUBMISSION = 3


@dataclass
class Load:
    """Clients that submit under idempotency keys until they are told to stop. Each repeats every submission once."""

    url: str
    api_key: str
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Prompt ids by idempotency key."""
    failures: list[str] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[Load]:
        threads = [threading.Thread(target=self._submit, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self.ending.set()
            for thread in threads:
                thread.join(120)

    def _submit(self, client_number: int) -> None:
        with SyncPenstockClient(self.url, api_key=self.api_key, timeout_s=2, deadline_s=60) as client:
            count = 0
            while not self.ending.is_set():
                key = f"client-{client_number}/{count}"
                prompts = [Prompt(token_ids=(2 + n, 3), num_samples=2) for n in range(PROMPTS_PER_SUBMISSION)]
                try:
                    first = tuple(client.submit(prompts, key).prompt_ids)
                    again = tuple(client.submit(prompts, key).prompt_ids)
                except Exception as error:
                    self.failures.append(f"{key}: {error!r}")
                    return
                if first != again:
                    self.failures.append(f"{key}: {first} and {again}")
                self.answers[key] = first
                count += 1
                self.ending.wait(0.02)

    def check(self, run: MatrixRun) -> None:
        """Every prompt that was answered is in the queue, and nothing else is."""
        assert self.failures == []
        ids = Counter(number for answer in self.answers.values() for number in answer)
        stat = run.stat()
        assert stat is not None
        run.measured.doubled = sum(times - 1 for times in ids.values()) + max(0, stat.pending_prompts - len(ids))
        run.measured.lost = max(0, len(ids) - stat.pending_prompts)
        assert (run.measured.lost, run.measured.doubled) == (0, 0)
        assert len(self.answers) > NUM_CLIENTS and run.conservation_errors == {0}


@pytest.fixture(name="gateway_run")
def run_of_a_gateway(make_run: MakeRun) -> MatrixRun:
    return make_run(gateway={"port": free_port()})


def wait_until_ready(run: MatrixRun) -> None:
    assert wait_for_port("127.0.0.1", run.config.gateway.port, timeout_s=60), run.report("no gateway")


def more_answers(run: MatrixRun, load: Load) -> Callable[[], None]:
    def wait() -> None:
        before = len(load.answers)
        run.until(lambda: load.failures or len(load.answers) > before + NUM_CLIENTS, "answers to clients")

    return wait


@pytest.mark.fault_row(
    AREA, "gateway killed under load", how="SIGKILL five times at seeded moments; four clients submit meanwhile",
    must="clients retry with the same idempotency key; no prompt is accepted twice",
)  # fmt: skip
def test_the_gateway_is_killed_under_load(gateway_run: MatrixRun) -> None:
    run = gateway_run
    run.start("gateway")
    wait_until_ready(run)
    load = Load(f"http://127.0.0.1:{run.config.gateway.port}", read_own_key(run.config.folder))
    with load.running():
        for _ in range(5):
            run.pause(run.random.uniform(0.3, 1.0))
            run.fault()
            run.kill("gateway")
            run.until(lambda: "gateway" in run.measured.restarts, "a new gateway")
            more_answers(run, load)()
            run.recovered()
    load.check(run)


@pytest.mark.fault_row(
    "network", "client to gateway", how="", must="clients retry with the same idempotency key; no prompt twice"
)
def test_the_clients_link_to_the_gateway_fails(gateway_run: MatrixRun) -> None:
    run = gateway_run
    run.start("gateway")
    wait_until_ready(run)
    with ProxyThread(("127.0.0.1", run.config.gateway.port)) as proxy:
        load = Load(f"http://127.0.0.1:{proxy.port}", read_own_key(run.config.folder))
        with load.running():
            make_faults(run, proxy, "client to gateway", more_answers(run, load))
        load.check(run)
    assert run.measured.restarts == {}


@pytest.mark.fault_row(
    "network", "gateway to Redis", how="", must="the gateway answers 503 and stays up; clients retry; no prompt twice"
)
def test_the_gateway_s_link_to_redis_fails(gateway_run: MatrixRun) -> None:
    run = gateway_run
    with ProxyThread(("127.0.0.1", run.redis.port)) as proxy:
        run.start_part("gateway", "penstock_services.gateway", run.through(proxy))
        wait_until_ready(run)
        load = Load(f"http://127.0.0.1:{run.config.gateway.port}", read_own_key(run.config.folder))
        with load.running():
            make_faults(run, proxy, "gateway to Redis", more_answers(run, load))
        load.check(run)
    assert run.measured.restarts == {}


@pytest.mark.fault_row(
    AREA,
    "feed killed",
    how="SIGKILL five times at seeded moments",
    must="it goes on; every row is submitted once, in order",
)
def test_the_feed_is_killed(make_run: MakeRun) -> None:
    run = make_run(seed=4, dataset={"max_pending": 20})
    run.start("feed")
    total = GROUPS_PER_STEP * NUM_STEPS

    def drain() -> int:
        """Lease what is there, so that the feed goes on. Returns how many prompts were leased so far."""
        leased = run.ask(lambda client: RedisReplayQueue(client, run.config.run, run.config.replay).lease("test", 12))
        seen.extend((lease.prompt_id, lease.payload) for lease in leased or [])
        return len(seen)

    seen: list[tuple[int, bytes]] = []
    run.config = run.config.model_copy(
        update={"replay": run.config.replay.model_copy(update={"max_staleness": 1000, "lease_ttl_s": 600})}
    )
    for kill in range(5):
        run.until(lambda kill=kill: drain() > kill * 30, "prompts")
        run.pause(run.random.uniform(0, 0.3))
        run.fault()
        run.kill("feed")
        before = len(seen) + 20
        run.until(lambda kill=kill: run.measured.restarts.get("feed") == kill + 1, "a new feed")
        run.until(lambda before=before: drain() > before, "the feed to go on")
        run.recovered()
    run.until(lambda: drain() >= total, "all prompts")
    assert [number for number, _ in seen] == list(range(1, total + 1))
    run.measured.lost, run.measured.doubled = total - len(seen), len(seen) - len({number for number, _ in seen})
    stat = run.stat()
    assert stat is not None and stat.pending_prompts == 0
    assert run.conservation_errors == {0}
