"""A role as the controller sees it: the class of its workers, the Ray actors of its ranks, calls to them, and their
restarts.

On a cluster that the learner joined (`learner.ray_address`), ranks outlive the controller: the next controller finds
them by name and adopts them, which saves it the start of the processes and the loading of the models. Ranks that no
controller has called for a while (rank.py) free their resources themselves. In a private Ray, ranks end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayTaskError
from ray.util import list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.cancellation import end_task
from penstock.config.gpu_bundles import bundles
from penstock.config.learner import LearnerConfig, RoleConfig
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, DeadlineExceeded, Fenced, PenstockError, ProcessDied, RoleDied
from penstock.machine import collecting_rarely
from penstock.user_code import load_object
from penstock_learner.roles.dispatch import Join, declarations
from penstock_learner.roles.profiling import runtime_environment

if TYPE_CHECKING:
    from penstock_learner.metrics import LearnerMetrics
    from penstock_learner.roles.rank import Rank


def _own_worker(role: str) -> type[Rank]:
    """Our own worker class of a role. Imports what it needs of models and checkpoints, which takes seconds."""
    if role == "policy":
        from penstock_learner.roles.policy import PolicyWorker

        return PolicyWorker
    if role == "critic":
        from penstock_learner.roles.critic import CriticWorker

        return CriticWorker
    from penstock_learner.roles.frozen import ReferenceWorker, RewardModelWorker

    return ReferenceWorker if role == "reference" else RewardModelWorker


def worker_of(config: LearnerConfig, name: str) -> type[Rank]:
    """The class of a role's ranks. Raises ConfigError if a user's class cannot be loaded or is not a worker."""
    own = config.roles.get(name)
    if own is None or not own.is_own_class:
        return _own_worker(name if own is None else own.worker)
    from penstock_learner.roles.rank import Rank

    key = f"learner.roles.{name}.worker"
    worker = load_object(own.worker, key)
    if not isinstance(worker, type) or not issubclass(worker, Rank):
        raise ConfigError(
            f"{key}: {own.worker} is not a worker; derive the class from Rank, TrainerRank or another worker"
        )
    if not declarations(worker):
        raise ConfigError(f"{key}: {own.worker} has no method for steps; mark one with @dispatched")
    if ".py:" in own.worker:
        # Ranks get the class itself: on other machines there may be no such file.
        cloudpickle.register_pickle_by_value(sys.modules[worker.__module__])
    return worker


def trained_roles(config: LearnerConfig) -> list[str]:
    """Names of the trained roles, the policy first. The models are imported only for a worker class of the user's."""
    return [name for name in config.needed_roles if _is_trained(config, name)]


def trains_as_policy(config: LearnerConfig, name: str) -> bool:
    """Whether the role is the policy, or has a worker class of the user's that is derived from the policy's."""
    own = config.roles.get(name)
    if own is None or not own.is_own_class:
        return name == "policy"
    from penstock_learner.roles.policy import PolicyWorker

    return issubclass(worker_of(config, name), PolicyWorker)


def _is_trained(config: LearnerConfig, name: str) -> bool:
    own = config.roles.get(name)
    if own is None:
        return name in ("policy", "critic")
    if not own.is_own_class:
        return own.worker == "critic"
    from penstock_learner.roles.trainer import TrainerRank

    return issubclass(worker_of(config, name), TrainerRank)


class RankActor:
    """The Ray actor of a rank whose worker class is ours. Its process imports the worker with its models. The
    controller makes it without them, so that processes of ranks start seconds earlier."""

    def __init__(self, config: RunConfig, rank: int, num_ranks: int, owner: str, name: str) -> None:
        with collecting_rarely():
            worker = worker_of(config.learner, name)
        self.worker = worker(config, rank, num_ranks, owner, name)

    def call(self, owner: str, method: str, *arguments: Any) -> Any:
        return self.worker.call(owner, method, *arguments)

    def adopt(self, owner: str, config: RunConfig) -> bool:
        return self.worker.adopt(owner, config)


def actor_class(config: LearnerConfig, name: str) -> type:
    """The class of a role's Ray actors. It has the name of the worker class, by which people and probes find the
    processes. A worker class of the user's is an actor itself, because its file may be missing where ranks run."""
    own = config.roles.get(name)
    if own is not None and own.is_own_class:
        return worker_of(config, name)
    return type(worker_name(name if own is None else own.worker), (RankActor,), {})


def worker_name(role: str) -> str:
    return f"{role.title().replace('_', '')}Worker"


logger = logging.getLogger(__name__)
SAVE_LANE = "save"
LANES = ("push", "catch_up", SAVE_LANE)
"""Besides the training thread, each rank has one thread per lane: for pushes, catch-up pushes and checkpoints."""
BEAT_LANE = "beat"
"""The thread in which a rank learns that its controller is alive."""


def namespace_of(config: RunConfig) -> str:
    """Ray's namespace of a run. Names of actors are unique within it."""
    return f"penstock-{config.run}"


@dataclass(eq=False)
class Reservation:
    """The placement group of a resource group. On a joined cluster it outlives the controller, with ranks in it. Ranks
    that wait in vain for the next controller remove it, perhaps while that one starts: see `holds`."""

    config: RunConfig
    roles: Mapping[str, RoleConfig]
    timeout_s: float
    group: PlacementGroup = field(init=False)
    _renewing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def take(self) -> None:
        """Reserve the resources, or find what an earlier controller reserved. Raises DeadlineExceeded if they do not
        fit."""
        self.group = self._find_or_make()
        deadline = time.monotonic() + self.timeout_s
        # In short pieces, because a thread cannot be cancelled. `PlacementGroup.ready` would run a task, in a process.
        while not await asyncio.to_thread(self.group.wait, 0.5):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the cluster has no room for {' + '.join(self.roles)} ({bundles(self.roles)}) after "
                    f"{self.timeout_s:.0f} s; add nodes, or lower learner.*.num_ranks"
                )

    async def holds(self, group: PlacementGroup) -> bool:
        """Whether `group` still is what is reserved. If it was removed, the resources are reserved again. Ray would
        never start an actor that is made in a group that was removed, nor say so."""
        async with self._renewing:
            if self.group is group and placement_group_table(group).get("state") == "REMOVED":
                await self.take()
            return self.group is group

    def release(self) -> None:
        """End all ranks in the group, and free its resources."""
        remove_placement_group(self.group)

    def _find_or_make(self) -> PlacementGroup:
        needed = bundles(self.roles)
        if not self.config.learner.ray_address:
            return placement_group(needed, strategy="PACK")
        name = "+".join(self.roles)
        with contextlib.suppress(ValueError):
            kept = get_placement_group(name)
            if kept.bundle_specs == needed:
                return kept
            remove_placement_group(kept)
        return placement_group(needed, strategy="PACK", name=name, lifetime="detached")


@dataclass(frozen=True)
class RoleActors:
    """Makes and finds the actors of a role, on resources that are reserved for it."""

    config: RunConfig
    name: str
    role: RoleConfig
    reserved: Reservation

    @property
    def outlive_controller(self) -> bool:
        return bool(self.config.learner.ray_address)

    @property
    def can_be_adopted(self) -> bool:
        """Whether ranks that outlive their controller fit the next one. Ranks of a user's class may run
        another version of its file."""
        own = self.config.learner.roles.get(self.name)
        return own is None or not own.is_own_class

    def make(self, number: int, owner: str) -> list[Any]:
        """Make one actor per rank. `number` makes the names differ from those of the other sets."""
        actor = actor_class(self.config.learner, self.name)
        remote: Any = ray.remote(concurrency_groups=dict.fromkeys((*LANES, BEAT_LANE), 1))(actor)
        try:
            return [
                remote.options(
                    name=f"{self.name}-{rank}-{number}",
                    lifetime="detached" if self.outlive_controller else None,
                    num_cpus=self.role.cpus_per_rank,
                    num_gpus=self.role.gpus_per_rank,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        self.reserved.group, placement_group_bundle_index=rank
                    ),
                    **runtime_environment(self.config, self.name, self.role, rank),
                ).remote(self.config, rank, self.role.num_ranks, owner, self.name)
                for rank in range(self.role.num_ranks)
            ]
        except ValueError as error:
            raise Fenced(f"{error}; another learner has started ranks of this run, stop this one") from error

    def find(self) -> dict[int, list[Any]]:
        """The sets that an earlier controller left, by number. A rank of a set may have died."""
        if not self.outlive_controller:
            return {}
        sets: dict[int, dict[int, Any]] = defaultdict(dict)
        for name in list_named_actors():
            if match := re.fullmatch(rf"{self.name}-(\d+)-(\d+)", name):
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    sets[int(match[2])][int(match[1])] = ray.get_actor(name)
        return {number: [ranks[rank] for rank in sorted(ranks)] for number, ranks in sorted(sets.items())}


OTHER_ERRORS_S = 5.0
"""How long to wait for other ranks' errors: one that lost its connection may report before the one that died."""
START_S = 120.0
"""How long the processes of new ranks may take to start, which is mostly imports, however short a call must be."""
ADOPT_S = 30.0
"""How long the first rank may take to end the call of a dead controller."""
OTHERS_ADOPT_S = 5.0
"""How long the other ranks may take after the first one. They end their calls together. One that is still busy waits in
a collective for a call that a dead controller has made to some ranks only, and would wait until its timeout."""
DEATHS = (RayActorError, NodeDiedError, ObjectLostError)
"""Errors that mean that a rank died. A large answer is lost if its node dies after the rank has answered."""
END_S = 10.0
BEAT_S = 10.0


async def gather_all(*calls: Awaitable[Any]) -> list[Any]:
    """The results of all calls. Waits for every call to end, then raises the first error if there was one."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def send_beats(roles: Iterable[RoleGroup]) -> None:
    while True:
        for role in roles:
            role.beat()
        await asyncio.sleep(BEAT_S)


async def run_with_ranks(work: Awaitable[None], roles: Collection[RoleGroup], stopping: asyncio.Event) -> None:
    """Do the controller's work, with concurrent beats. Then end the ranks, or let them wait for a successor
    if the controller is to stop. If a rank fails that is still alive, for example with a broken CUDA context, the ranks
    end too: they would fail every controller that adopts them. After any other error they wait for the next one."""
    beats = asyncio.create_task(send_beats(roles))
    try:
        try:
            await work
        finally:
            await end_task(beats)
    except ProcessDied:
        await gather_all(*(role.end() for role in roles))
        raise
    await gather_all(*(role.end(await_successor=stopping.is_set()) for role in roles))


class RoleGroup:
    """The actors of one role, rank by rank."""

    def __init__(self, source: RoleActors, timeout_s: float) -> None:
        self.source = source
        self.name = source.name
        self.worker = worker_name(self.name)
        self.timeout_s = timeout_s
        self.owner = secrets.token_hex(8)
        """Identifies this controller to the ranks, which refuse the calls of every other one."""
        self.actors: list[Any] = []
        self.num_sets = 0
        self.is_up = False
        """Whether the newest set was started completely. Its ranks may have died since."""
        self.declarations: dict[str, Join] = {}
        """The methods that steps may call, as the ranks declare them."""

    @property
    def num_ranks(self) -> int:
        return len(self.actors)

    async def start(self) -> None:
        """Kill the actors of the earlier set, take a new set, form its process group and load the model."""
        self.is_up = False
        if self.num_sets == 0:  # an earlier controller may have left ranks
            for number, actors in self.source.find().items():
                self.num_sets = number
                self.actors += actors
        for actor in self.actors:
            ray.kill(actor)
        self.actors = await self._make_set()
        started = [self._call(actor, "wait_idle") for actor in self.actors]
        await self._gather("wait_idle", started, max(self.timeout_s, START_S))
        rendezvous = await self.call_rank(0, "rendezvous")
        await self.call_all("join", rendezvous)
        await self.call_all("load")
        self.declarations = await self.call_rank(0, "declarations")
        await self.call_all("mark_up")
        self.is_up = True

    async def adopt(self) -> bool:
        """Take the ranks that an earlier controller left. False if none is fit. Ranks that are dead, busy
        or of another config are killed. From here on the ranks refuse the calls of every earlier controller. They may
        have trained further than the newest checkpoint: load that before they are used."""
        if not self.source.can_be_adopted:
            return False  # `start` kills them
        for number, actors in self.source.find().items():
            self.num_sets = number
            if not self.is_up and await self._adopt_set(actors):
                self.actors, self.is_up = actors, True
            else:
                for actor in actors:
                    ray.kill(actor)
        if self.is_up:
            self.declarations = await self.call_rank(0, "declarations")
        return self.is_up

    async def _adopt_set(self, actors: list[Any]) -> bool:
        """Adopt the ranks. Returns whether all of them are up and can be used."""
        if len(actors) != self.source.role.num_ranks:
            return False
        calls = [asyncio.ensure_future(actor.adopt.remote(self.owner, self.source.config)) for actor in actors]
        try:
            await asyncio.wait(calls, timeout=ADOPT_S, return_when=asyncio.FIRST_COMPLETED)
            if not all(await self._gather("adopt", calls, OTHERS_ADOPT_S)):
                return False
            # A push or a checkpoint of the controller before may still run.
            idle = [self._call(actor, "wait_idle", lane=lane) for lane in LANES for actor in actors]
            await self._gather("wait_idle", idle, ADOPT_S)
        except PenstockError as error:
            logger.warning("%s; the ranks of the %s role are started again", error, self.name)
            return False
        return True

    def beat(self) -> None:
        """Tell the ranks that their controller is alive. Does not wait for them."""
        for actor in self.actors:
            self._call(actor, "beat", lane=BEAT_LANE)

    async def end(self, *, await_successor: bool = False) -> None:
        """End the ranks and free their resources, unless another controller has adopted them. With `await_successor`,
        ranks that outlive their controller wait a short time for the next one."""
        if not self.actors and self.source.find():
            return  # this controller has adopted none of them
        waits = await_successor and self.source.outlive_controller
        method = "await_successor" if waits else "beat"
        calls = [self._call(actor, method, lane=BEAT_LANE) for actor in self.actors]
        try:
            if calls:
                await self._gather(method, calls, END_S)
        except Fenced:
            return
        except PenstockError as error:
            logger.warning("%s; its ranks are ended", error)
            waits = False
        if not waits:
            self.source.reserved.release()

    async def call_all(self, method: str, *arguments: Any) -> list[Any]:
        return await self.call_each(method, [arguments] * self.num_ranks)

    async def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call every rank, rank i with arguments[i]. Returns all results, or raises one error."""
        references = [self._call(actor, method, *own) for actor, own in zip(self.actors, arguments, strict=True)]
        return await self._gather(method, references, self.timeout_s)

    async def call_rank(self, rank: int, method: str, *arguments: Any) -> Any:
        reference = self._call(self.actors[rank], method, *arguments)
        return (await self._gather(method, [reference], self.timeout_s))[0]

    async def call_in_lane(self, lane: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call rank 0 in the lane's thread, which runs concurrently with training."""
        reference = self._call(self.actors[0], method, *arguments, lane=lane)
        return (await self._gather(method, [reference], timeout_s))[0]

    async def call_all_in_lane(self, lane: str, method: str, *arguments: Any) -> list[Any]:
        """Call every rank in the lane's thread, which runs concurrently with training."""
        references = [self._call(actor, method, *arguments, lane=lane) for actor in self.actors]
        return await self._gather(method, references, self.timeout_s)

    def _call(self, actor: Any, method: str, *arguments: Any, lane: str | None = None) -> Any:
        """Begin a call, as the owner of the rank. Process titles and timelines show it as a call of `method`."""
        options = {"name": f"{self.worker}.{method}"} | ({"concurrency_group": lane} if lane else {})
        return actor.call.options(**options).remote(self.owner, method, *arguments)

    async def _make_set(self) -> list[Any]:
        while True:
            group = self.source.reserved.group
            self.num_sets += 1
            actors = self.source.make(self.num_sets, self.owner)
            if await self.source.reserved.holds(group):
                return actors
            for actor in actors:
                ray.kill(actor)

    async def _gather(self, method: str, references: list[Any], timeout_s: float) -> list[Any]:
        calls = [asyncio.ensure_future(reference) for reference in references]
        try:
            _, running = await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            errors = [error for call in calls if call.done() and (error := call.exception())]
            if running and errors:
                await asyncio.wait(running, timeout=OTHER_ERRORS_S)
                errors = [error for call in calls if call.done() and (error := call.exception())]
            elif running:
                raise RoleDied(
                    self.name,
                    f"{self.name}.{method} did not finish in {timeout_s:.0f} s; a rank hangs or is overloaded "
                    "(see its log, or raise learner.rank_timeout_s)",
                )
            if errors:
                raise self._explained(method, errors)
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()

    def _explained(self, method: str, errors: list[BaseException]) -> BaseException:
        """The error that explains the others. If a rank died, that explains the errors of the other ranks."""
        for error in errors:
            if isinstance(error, RayActorError) and error.actor_init_failed:  # it would fail again
                reason = str(error).strip().splitlines()[-1]
                return ProcessDied(f"a rank of the {self.name} role could not start: {reason}")
        if any(isinstance(error, DEATHS) for error in errors):
            return RoleDied(self.name, f"a rank of the {self.name} role died in {method}")
        error = errors[0]
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, PenstockError):
            return cause
        reason = next(iter(str(cause).splitlines()), "")  # CUDA and Ray explain themselves at length
        return ProcessDied(f"{self.name}.{method} failed: {type(cause).__name__}: {reason} (see the rank's log)")


@dataclass(eq=False)
class RoleRecovery:
    """Counts the restarts of each role since `made_progress` was last called."""

    max_restarts: int
    metrics: LearnerMetrics
    _in_a_row: Counter[str] = field(default_factory=Counter)

    async def start(self, role: RoleGroup) -> None:
        """Start the role. If a rank dies while it starts, restart it."""
        try:
            await role.start()
        except RoleDied as error:
            await self.restart(role, error)

    async def restart(self, role: RoleGroup, error: RoleDied) -> None:
        """Start a new set of ranks from the model folder. Raises ProcessDied after too many restarts in a row."""
        while True:
            if self._in_a_row[role.name] >= self.max_restarts:
                raise ProcessDied(
                    f"{error}; it was restarted {self.max_restarts} times in a row (learner.max_role_restarts); see "
                    "the logs of its ranks, then start the learner again; it continues from its checkpoint"
                ) from error
            self._in_a_row[role.name] += 1
            self.metrics.role_restarts.labels(role.name).inc()
            logger.warning("%s; the %s role is restarted", error, role.name)
            try:
                await role.start()
                return
            except RoleDied as again:
                error = again

    def made_progress(self) -> None:
        """Called when a checkpoint is durable: restarts before it no longer count."""
        self._in_a_row.clear()
