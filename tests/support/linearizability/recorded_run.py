"""Clients of a queue that record every call, while its gateway and its Redis are killed and started again.

Redis writes its log before it answers (`appendfsync always`), so it must keep all that it has acknowledged. A restart
takes a moment, in which clients wait: only the calls that are under way when a process dies lose their answers.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.api_keys import make_key
from penstock.codec import decode_prompt
from penstock.config.loading import dump_config, validate
from penstock.errors import DeadlineExceeded, Fenced, Unavailable
from penstock.machine import free_port, wait_for_port
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import Lease
from penstock.store.fleet import Fleet, Quarantines
from penstock.store.redis_client import connect
from support.fleet_runs import EXAMPLE, Part
from support.gateways import running
from support.linearizability.checker import Call
from support.linearizability.queue_model import Details, History, Name, Seen
from support.linearizability.recorded_tasks import CALLS as TASK_CALLS
from support.linearizability.recorded_tasks import RecordedTasks
from support.redis_server import RedisProcess

RUN = "linear"
LEASE_TTL_S = 0.8
MAX_ATTEMPTS = 3
LOST = (Unavailable, DeadlineExceeded, httpx.TransportError, TimeoutError)
"""The call may have been executed."""
MAX_PAUSE_S = 0.03
NUM_SUBMITTERS, NUM_SERVERS = 3, 2
OWNERS = ("alice", "bob")
"""API keys. They take turns in owning submissions, and each pair of submissions has the same idempotency key."""
GATEWAY_START_S = 100
MOST_S = 120
CALLS = {"submit", "lease", "append", "take", "commit", "cancel", "requeue"}
INTRUSIONS = {
    "take", "commit", "expire", "dead_letter", "discard", "finish", "rewind", "rewind_step", "allocate_version",
    "publish", "set_server_state", "set_quarantine", "forget_silent",
}  # fmt: skip
"""Calls that every history has: of the clients, and of learners whose term has passed."""
POISON = {"prompts": [{"token_ids": [10**6, 0]}], "idempotency_key": "poison"}


@dataclass(frozen=True)
class Plan:
    """What clients do, and what is killed. The same seed makes the same choices; times differ from run to run."""

    seed: int
    duration_s: float
    redis_kills: int = 1
    gateway_kills: int = 1
    is_gateway_inside: bool = False
    """Run the gateway in this process, whose scripts a test may have changed. It cannot be killed."""


@dataclass
class Timed:
    """The answer of a call, None if it was lost, and its times."""

    called_s: float
    returned_s: float = math.inf
    answer: Any = None
    latest_s: float = math.inf
    """By when a call without an answer was executed, if ever."""

    @property
    def is_lost(self) -> bool:
        return math.isinf(self.returned_s)


class Recorder:
    """Times calls, and adds them to the history with what they say of each prompt."""

    def __init__(self) -> None:
        self.history = History(LEASE_TTL_S, MAX_ATTEMPTS)
        self.names: dict[int, Name] = {}
        """The prompt of each id that any answer has shown."""
        self.num_lost = 0
        self._started_s = time.monotonic()

    def now_s(self) -> float:
        """Seconds since the recording began."""
        return time.monotonic() - self._started_s

    async def timed(self, call: Awaitable[Any], is_up: asyncio.Event | None = None) -> Timed:
        """Await a call. `is_up`, for a call that is sent to Redis itself, is set once Redis was started again: if the
        connection broke, the killed process executes nothing any more."""
        timed = Timed(self.now_s())
        try:
            timed.answer = await call
        except LOST as error:
            self.num_lost += 1
            if is_up is not None and not isinstance(error.__cause__, RedisTimeoutError):
                await is_up.wait()
                timed.latest_s = self.now_s()
        else:
            timed.returned_s = self.now_s()
        return timed

    def add(self, client: str, name: str, timed: Timed, named: dict[Name, Seen], text: str, **details: Any) -> None:
        """Add a call on these prompts. Prompts that are no part of the history are left out."""
        known = {name: seen for name, seen in named.items() if name[0] in self.history.sizes}
        for prompt, seen in known.items():
            if seen.prompt_id:
                self.names.setdefault(seen.prompt_id, prompt)
        if known or name in ("commit", "rewind_step"):
            times = timed.called_s, timed.returned_s
            call = Call(client, name, *times, Details((), **details), text, timed.latest_s)
            self.history.calls.append((call, known))

    def add_lost(self, client: str, name: str, timed: Timed, **details: Any) -> None:
        """Add a call that may have moved any prompt."""
        call = Call(client, name, timed.called_s, math.inf, Details((), **details), "?", timed.latest_s)
        self.history.lost_anywhere.append(call)

    def add_term(self, client: str, name: str, timed: Timed, details: Any) -> None:
        self.history.terms.append(Call(client, name, timed.called_s, timed.returned_s, details, f"term {details}"))

    def of_ids(self, prompt_ids: list[int], **seen: Any) -> dict[Name, Seen]:
        names = {prompt_id: self.names[prompt_id] for prompt_id in prompt_ids if prompt_id in self.names}
        return {name: Seen(name[1], prompt_id, **seen) for prompt_id, name in names.items()}


def name_of(payload: bytes) -> Name:
    number, index = decode_prompt(payload).token_ids
    return number, index


def _seen(lease: Lease, state: str = "") -> dict[Name, Seen]:
    name = name_of(lease.payload)
    return {name: Seen(name[1], lease.prompt_id, lease.attempt, state)}


@dataclass
class RecordedRun:
    """Enter it, and call `run`. Leaving it ends its processes."""

    folder: Path
    plan: Plan
    recorder: Recorder = field(default_factory=Recorder)
    num_poisoned: int = 0
    """Submissions that failed because their key is of the wrong type."""
    intruded: set[str] = field(default_factory=set)
    """Calls that a learner has made after its term."""
    page_tokens: dict[str, str] = field(default_factory=dict)
    """The next page of the list of prompts, by client."""

    async def __aenter__(self) -> RecordedRun:
        self.random = random.Random(self.plan.seed)
        self.redis = RedisProcess(self.folder / "redis")
        text = self.redis.config.read_text().replace("appendfsync everysec", "appendfsync always")
        self.redis.config.write_text(text)
        self.redis.start()
        made = {name: make_key(name, "admin" if name == "operator" else "submit") for name in ("operator", *OWNERS)}
        (self.folder / "keys").write_text("\n".join(key.line for _, key in made.values()))
        self.headers = {name: {"Authorization": f"Bearer {secret}"} for name, (secret, _) in made.items()}
        replay = {
            "groups_per_step": 10_000, "lease_ttl_s": LEASE_TTL_S, "max_attempts": MAX_ATTEMPTS,
            "breaker": {"failures": 0},
        }  # fmt: skip
        self.config = validate(
            {
                "run": RUN, "run_dir": str(self.folder), "model": {"path": str(EXAMPLE / "model")}, "replay": replay,
                "redis": {"url": self.redis.url, "timeout_s": 30},
                "gateway": {"port": free_port(), "keys_file": str(self.folder / "keys")},
            },
            "test",
        )  # fmt: skip
        self.config.folder.mkdir(parents=True)
        (self.folder / "gateway.yaml").write_text(dump_config(self.config))
        self.is_redis_up, self.is_gateway_up, self.is_over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.is_redis_up.set()
        self.client = connect(self.config.redis)
        may_go_on = partial(self._may_go_on, self.is_redis_up)
        self.tasks = RecordedTasks(self.client, self.recorder, may_go_on, self.is_redis_up)
        self.parts: list[Part] = []
        self.stack = AsyncExitStack()
        if self.plan.is_gateway_inside:
            await self.stack.enter_async_context(running(self.config))
            self.is_gateway_up.set()
        else:
            await self._start_gateway()
        self.rest = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.config.gateway.port}/v1/runs/{RUN}", timeout=60, trust_env=False,
            headers=self.headers["operator"],
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rest.aclose()
        await self.stack.aclose()
        await self.client.aclose()
        for part in self.parts:
            part.end()
        self.redis.kill()

    async def run(self) -> History:
        """Let the clients work for the plan's time, then read every prompt."""
        clients: list[Callable[[str, random.Random], Awaitable[None]]] = [self._submitter] * NUM_SUBMITTERS
        clients += [self._server] * NUM_SERVERS + [self._learner, self._poison, *self.tasks.clients]
        await self._make_poison()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._kill())
            for number, client in enumerate(clients):
                name = f"{client.__name__.strip('_')}-{number}"
                tasks.create_task(client(name, random.Random(f"{self.plan.seed}/{name}")))
        for prompt_id in sorted(self.recorder.names):
            await self._get("end", prompt_id)
        await self.tasks.end()
        return self.recorder.history

    # ── faults ──

    async def _kill(self) -> None:
        victims = ["redis"] * self.plan.redis_kills + ["gateway"] * self.plan.gateway_kills
        self.random.shuffle(victims)
        pause_s = self.plan.duration_s / (len(victims) + 1)
        for victim in victims:
            await asyncio.sleep(pause_s * self.random.uniform(0.5, 1.0))
            if victim == "redis":
                self.is_redis_up.clear()
                await asyncio.to_thread(self.redis.kill)
                await asyncio.to_thread(self.redis.start)
                self.is_redis_up.set()
            else:
                self.is_gateway_up.clear()
                await asyncio.to_thread(self.parts[-1].kill)
                await self._start_gateway()
        await asyncio.sleep(pause_s)
        async with asyncio.timeout(MOST_S):  # a slow machine takes longer until every call was made
            while self.intruded != INTRUSIONS or not self._has_called_all():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        self.is_over.set()

    def _has_called_all(self) -> bool:
        called = {call.name for call, _ in self.recorder.history.calls}
        return called >= CALLS and self.tasks.called >= TASK_CALLS and self.num_poisoned > 0

    async def _start_gateway(self) -> None:
        command = [sys.executable, "-m", "penstock_services.gateway", "--config", str(self.folder / "gateway.yaml")]
        self.parts.append(Part("gateway", command, self.folder / "gateway.log"))
        is_up = await asyncio.to_thread(wait_for_port, "127.0.0.1", self.config.gateway.port, timeout_s=GATEWAY_START_S)
        assert is_up, self.parts[-1].output()
        self.is_gateway_up.set()

    async def _make_poison(self) -> None:
        """Find the key that Redis keeps for an idempotency key, and give it a value of another type."""
        keys: list[set[bytes]] = []
        for body in ({"prompts": POISON["prompts"]}, POISON):
            assert (await self.rest.post("/prompts", json=body)).status_code == 200
            keys.append({*await self.client.keys("*")})
        [key] = keys[1] - keys[0]
        await self.client.delete(key)
        await self.client.rpush(key, "not a hash")

    async def _poison(self, client: str, dice: random.Random) -> None:
        """Submit under that key. The script fails, and the submissions that were joined with it are sent one by one."""
        while await self._may_go_on(self.is_redis_up, self.is_gateway_up):
            try:
                response = await self.rest.post("/prompts", json=POISON)
                self.num_poisoned += response.status_code == 500
            except httpx.TransportError:
                continue
            await asyncio.sleep(dice.uniform(0, MAX_PAUSE_S))

    async def _may_go_on(self, *events: asyncio.Event) -> bool:
        for event in events:
            await event.wait()
        return not self.is_over.is_set()

    # ── clients of the gateway ──

    async def _submitter(self, client: str, dice: random.Random) -> None:
        actions: list[Callable[..., Awaitable[None]]] = [self._submit, self._repeat, self._read, self._cancel]
        actions += [self._list, self._requeue]
        while await self._may_go_on(self.is_redis_up, self.is_gateway_up):
            [action] = dice.choices(actions, weights=[5, 4, 6, 1, 1, 2])
            await action(client, dice)
            await asyncio.sleep(dice.uniform(0, MAX_PAUSE_S))

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        response = await self.rest.request(method, f"/{path}", **options)
        if response.status_code >= 500:
            raise Unavailable(response.text)
        return response

    async def _submit(self, client: str, dice: random.Random) -> None:
        sizes = self.recorder.history.sizes
        number = len(sizes) + 1
        sizes[number] = dice.randint(1, 3)
        await self._post(client, number)

    async def _repeat(self, client: str, dice: random.Random) -> None:
        if sizes := self.recorder.history.sizes:
            await self._post(client, dice.choice(list(sizes)[-20:]))

    async def _post(self, client: str, number: int) -> None:
        size = self.recorder.history.sizes[number]
        prompts = [{"token_ids": [number, index]} for index in range(size)]
        body = {"prompts": prompts, "idempotency_key": f"key-{number // 2}"}
        headers = self.headers[OWNERS[number % 2]]
        timed = await self.recorder.timed(self._send("POST", "prompts", json=body, headers=headers))
        if timed.is_lost:
            named, replayed, text = {(number, index): Seen(index) for index in range(size)}, None, f"key-{number} = ?"
        else:
            assert timed.answer.status_code == 200, timed.answer.text
            answer = timed.answer.json()
            ids, replayed = answer["prompt_ids"], answer["replayed"]
            named = {(number, index): Seen(index, prompt_id) for index, prompt_id in enumerate(ids)}
            text = f"key-{number} = {ids}{', replayed' if replayed else ''}"
        self.recorder.add(client, "submit", timed, named, text, replayed=replayed)

    def _some_id(self, dice: random.Random) -> int | None:
        return dice.choice(list(self.recorder.names)[-60:]) if self.recorder.names else None

    async def _read(self, client: str, dice: random.Random) -> None:
        if (prompt_id := self._some_id(dice)) is not None:
            await self._get(client, prompt_id)

    async def _get(self, client: str, prompt_id: int) -> None:
        timed = await self.recorder.timed(self._send("GET", f"prompts/{prompt_id}"))
        if timed.is_lost:
            return
        found = timed.answer.json() if timed.answer.status_code == 200 else {"state": "unknown", "attempt": 0}
        state, attempt = found["state"].lower(), found["attempt"]
        named = self.recorder.of_ids([prompt_id], state=state, attempt=attempt)
        self.recorder.add(client, "get", timed, named, f"{prompt_id} = {state}, attempt {attempt}")

    async def _list(self, client: str, dice: random.Random) -> None:
        page = {"page_size": 50, "page_token": self.page_tokens.get(client, "")}
        timed = await self.recorder.timed(self._send("GET", "prompts", params=page))
        if timed.is_lost:
            return
        assert timed.answer.status_code == 200, timed.answer.text
        answer = timed.answer.json()
        self.page_tokens[client] = answer["next_page_token"]
        for found in answer["prompts"]:
            state = found["state"].lower()
            if found["prompt"]:
                number, index = found["prompt"]["token_ids"]
                named = {(number, index): Seen(index, found["prompt_id"], found["attempt"], state)}
            else:
                named = self.recorder.of_ids([found["prompt_id"]], state=state, attempt=found["attempt"])
            self.recorder.add(client, "list", timed, named, f"{found['prompt_id']} = {state}")

    async def _cancel(self, client: str, dice: random.Random) -> None:
        if (prompt_id := self._some_id(dice)) is None:
            return
        number, body = self.recorder.names[prompt_id][0], {"prompt_ids": [prompt_id]}
        own, stranger = self.headers[OWNERS[number % 2]], self.headers[OWNERS[(number + 1) % 2]]
        tried = await self.recorder.timed(self._send("POST", "prompts:cancel", json=body, headers=stranger))
        if not tried.is_lost:  # it has no part in the history, because it must do nothing
            state = tried.answer.json()["prompts"][0]["state"]
            assert state in ("STATE_UNSPECIFIED", "TRAINED", "DEAD_LETTERED", "CANCELLED"), tried.answer.text
        timed = await self.recorder.timed(self._send("POST", "prompts:cancel", json=body, headers=own))
        state, attempt = "", 0
        if not timed.is_lost:
            assert timed.answer.status_code == 200, timed.answer.text
            [found] = timed.answer.json()["prompts"]
            state, attempt = found["state"].lower(), found["attempt"]
        named = self.recorder.of_ids([prompt_id], state=state, attempt=attempt)
        self.recorder.add(client, "cancel", timed, named, f"{prompt_id} = {state or '?'}")

    async def _requeue(self, client: str, dice: random.Random) -> None:
        timed = await self.recorder.timed(self._send("GET", "dead-letters"))
        if timed.is_lost:
            return
        letters = timed.answer.json()["dead_letters"]
        for letter in letters:
            named = self.recorder.of_ids([letter["prompt_id"]])
            self.recorder.add(client, "list_dead", timed, named, str(letter["prompt_id"]))
        if not letters:
            return
        letter = dice.choice(letters)
        again = await self.recorder.timed(self._send("POST", f"dead-letters/{letter['letter_id']}:requeue"))
        new_id = -1
        if not again.is_lost:
            assert again.answer.status_code in (200, 404), again.answer.text
            new_id = again.answer.json()["prompt_id"] if again.answer.status_code == 200 else 0
        named = self.recorder.of_ids([letter["prompt_id"]], attempt=new_id)
        if new_id > 0 and named:
            self.recorder.names.setdefault(new_id, next(iter(named)))
        self.recorder.add(client, "requeue", again, named, f"{letter['prompt_id']} = {new_id if new_id >= 0 else '?'}")

    # ── a rollout server ──

    async def _server(self, client: str, dice: random.Random) -> None:
        queue = RedisReplayQueue(self.client, RUN, self.config.replay)
        held: list[Lease] = []
        """Leases that were neither finished nor given back. Most of them run out."""
        while await self._may_go_on(self.is_redis_up):
            for lease in await self._lease(client, queue, dice.randint(1, 4)):
                action = dice.random()
                if action < 0.6:
                    for _ in range(dice.choice([1, 1, 1, 2])):  # a server repeats an append whose answer it lost
                        await self._append(client, queue, lease)
                elif action < 0.8:
                    await self._give_back(client, queue, lease, dice.choice(["", "", "broken"]))
                else:
                    held.append(lease)
                await asyncio.sleep(dice.uniform(0, MAX_PAUSE_S / 3))
            if held and dice.random() < 0.5:
                newest = {lease.prompt_id: lease for lease in held}  # the answer names prompts, not leases
                await self._heartbeat(client, queue, dice.sample(list(newest.values()), min(len(newest), 3)))
            if held and dice.random() < 0.3:  # perhaps long after the lease was lost
                await self._append(client, queue, held.pop(dice.randrange(len(held))))
            await asyncio.sleep(dice.uniform(0, MAX_PAUSE_S))

    async def _lease(self, client: str, queue: RedisReplayQueue, count: int) -> list[Lease]:
        timed = await self.recorder.timed(queue.lease(client, count), self.is_redis_up)
        if timed.is_lost:
            self.recorder.add_lost(client, "lease", timed, server=client)
            return []
        leases: list[Lease] = timed.answer
        named = {name: seen for lease in leases for name, seen in _seen(lease).items()}
        text = ", ".join(f"{lease.prompt_id} (attempt {lease.attempt})" for lease in leases)
        self.recorder.add(client, "lease", timed, named, f"= {text}", server=client)
        return leases

    async def _append(self, client: str, queue: RedisReplayQueue, lease: Lease) -> None:
        timed = await self.recorder.timed(queue.append(lease, b"group of %b" % lease.payload, 0), self.is_redis_up)
        outcome = timed.answer or ""
        text = f"{lease.prompt_id} (attempt {lease.attempt}) = {outcome or '?'}"
        self.recorder.add(client, "append", timed, _seen(lease, outcome), text, server=client)

    async def _give_back(self, client: str, queue: RedisReplayQueue, lease: Lease, failure: str) -> None:
        timed = await self.recorder.timed(queue.give_back(client, lease, failure), self.is_redis_up)
        text = f"{lease.prompt_id} (attempt {lease.attempt}) {failure}"
        self.recorder.add(client, "give_back", timed, _seen(lease), text, server=client, failure=failure)

    async def _heartbeat(self, client: str, queue: RedisReplayQueue, leases: list[Lease]) -> None:
        timed = await self.recorder.timed(queue.heartbeat(client, leases), self.is_redis_up)
        for lease in leases:
            state = "" if timed.is_lost else "lost" if lease.prompt_id in timed.answer else "held"
            text = f"{lease.prompt_id} (attempt {lease.attempt}) = {state or '?'}"
            self.recorder.add(client, "heartbeat", timed, _seen(lease, state), text, server=client)

    # ── the learner ──

    async def _learner(self, client: str, dice: random.Random) -> None:
        """A learner, and its successors: each that crashes leaves a zombie, whose calls must be refused."""
        step, count, zombie = 0, 0, None
        while await self._may_go_on(self.is_redis_up):
            count += 1
            learner = Learner(self, f"{client}.{count}", dice, step)
            await learner.take_over()
            while await self._may_go_on(self.is_redis_up) and dice.random() > 0.08:
                await learner.make_step()
                if zombie is not None and dice.random() < 0.3:
                    await zombie.intrude()
                await asyncio.sleep(dice.uniform(0, MAX_PAUSE_S))
            step, zombie = learner.step, learner


class Learner:
    """One learner. It repeats a call whose answer was lost, except some takes."""

    def __init__(self, run: RecordedRun, client: str, dice: random.Random, step: int) -> None:
        self.run, self.client, self.dice, self.step = run, client, dice, step
        self.recorder = run.recorder
        self.queue = RedisReplayQueue(run.client, RUN, run.config.replay)
        self.taken: list[int] = []

    async def take_over(self) -> None:
        while True:
            timed = await self.recorder.timed(self.queue.take_term(0))
            self.recorder.add_term(self.client, "take_term", timed, timed.answer)
            if not timed.is_lost:
                break
            await self.run.is_redis_up.wait()
        num_trained = self.step * self.queue.config.groups_per_step  # so that admission never stops a lease
        timed = await self._until_answered("rewind_step", lambda: self.queue.rewind_step(self.step, num_trained), {})
        listed = [prompt_id for ids in timed.answer.values() for prompt_id in ids]
        named = self.recorder.of_ids(listed, state="listed")
        self.recorder.add(self.client, "rewind_step", timed, named, f"{self.step} = {timed.answer}")
        self.step = max((self.step, *timed.answer))
        self.taken = listed

    async def make_step(self) -> None:
        self.step += 1
        is_known = await self.take()
        while not is_known and self.dice.random() < 0.8:  # else the commit makes ready what the lost take delivered
            is_known = await self.take()
        trained = []
        for prompt_id in self.taken:
            action = self.dice.random()
            if action < 0.12:
                await self._drop("expire", prompt_id, lambda of=prompt_id: self.queue.expire(of))
            elif action < 0.2:
                await self._drop("dead_letter", prompt_id, lambda of=prompt_id: self.queue.dead_letter(of, "bad"))
            else:
                trained.append(prompt_id)
        await self._commit(trained)
        self.taken = []

    async def take(self) -> bool:
        """Take groups for the step. Returns whether the answer arrived."""
        called_s = self.recorder.now_s()
        try:
            timed = await self.recorder.timed(self.queue.take(self.step, 4), self.run.is_redis_up)
        except Fenced:
            self._record_term("take", Timed(called_s, self.recorder.now_s()), is_fenced=True)
            return True
        if timed.is_lost:
            self.recorder.add_lost(self.client, "take", timed, step=self.step)
            return False
        self._record_term("take", timed)
        named = self.recorder.of_ids(timed.answer)
        self.recorder.add(self.client, "take", timed, named, f"step {self.step} = {timed.answer}", step=self.step)
        self.taken += timed.answer
        fetched = await self.recorder.timed(self.queue.fetch(timed.answer))
        for delivery in fetched.answer or ():
            number, index = name_of(delivery.payload.removeprefix(b"group of "))
            seen = {(number, index): Seen(index, delivery.prompt_id)}
            self.recorder.add(self.client, "fetch", fetched, seen, str(delivery.prompt_id))
        return True

    async def intrude(self) -> None:
        """Make a call of a term that has passed, on prompts that the successor may work on. It must be refused."""
        ids = self.dice.sample(list(self.recorder.names), min(3, len(self.recorder.names))) or [1]
        fleet, quarantines, term = Fleet(self.run.client, RUN), Quarantines(self.run.client, RUN), self.queue.term
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "take": lambda: self.queue.take(self.step, 4), "commit": lambda: self.queue.commit(self.step, ids),
            "expire": lambda: self.queue.expire(ids[0]), "dead_letter": lambda: self.queue.dead_letter(ids[0], "bad"),
            "discard": lambda: self.queue.discard(ids[0], "bad"), "finish": lambda: self.queue.finish(self.step),
            "rewind": lambda: self.queue.rewind("/checkpoints/0", 0, []),
            "rewind_step": lambda: self.queue.rewind_step(0, 0),
            "allocate_version": lambda: self.queue.allocate_version(1),
            "publish": lambda: self.queue.publish(1, 1, b"policy"),
            "set_server_state": lambda: fleet.set_state("server", "READY", term),
            "set_quarantine": lambda: quarantines.end("server", term),
            "forget_silent": lambda: fleet.forget_silent(3600, term),
        }  # fmt: skip
        assert calls.keys() == INTRUSIONS
        new = [name for name in calls if name not in self.run.intruded]
        for name in self.dice.sample(new or list(calls), min(3, len(new) or 3)):
            self.run.intruded.add(name)
            called_s = self.recorder.now_s()
            try:
                timed = await self.recorder.timed(calls[name](), self.run.is_redis_up)
            except Fenced:
                self._record_term(name, Timed(called_s, self.recorder.now_s()), is_fenced=True)
            else:
                if not timed.is_lost:
                    self._record_term(name, timed)

    async def _drop(self, name: str, prompt_id: int, call: Callable[[], Awaitable[Any]]) -> None:
        named = self.recorder.of_ids([prompt_id])
        timed = await self._until_answered(name, call, named, text=str(prompt_id))
        self.recorder.add(self.client, name, timed, named, str(prompt_id))

    async def _commit(self, trained: list[int]) -> None:
        named, text = self.recorder.of_ids(trained, state="covered"), f"step {self.step}: {trained}"
        timed = await self._until_answered(
            "commit", lambda: self.queue.commit(self.step, trained), named, text=text, step=self.step
        )
        is_found = {len(trained): True, 0: False}.get(timed.answer) if trained else None
        self.recorder.add(
            self.client, "commit", timed, named, f"{text} = {timed.answer}", step=self.step, is_found=is_found
        )

    async def _until_answered(
        self, name: str, call: Callable[[], Awaitable[Any]], named: dict[Name, Seen], text: str = "", **details: Any
    ) -> Timed:
        """Repeat a call of the learner's term until it is answered, and record the answers that were lost."""
        while True:
            timed = await self.recorder.timed(call(), self.run.is_redis_up)
            if not timed.is_lost:
                self._record_term(name, timed)
                return timed
            if name != "rewind_step":
                self.recorder.add(self.client, name, timed, named, f"{text} = ?", **details)

    def _record_term(self, name: str, timed: Timed, *, is_fenced: bool = False) -> None:
        self.recorder.add_term(self.client, name, timed, (self.queue.term, is_fenced))
