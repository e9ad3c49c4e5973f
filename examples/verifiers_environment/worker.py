"""Environments of verifiers as tasks: a worker runs their episodes, and the model that they call is trained.

python examples/verifiers_environment/worker.py sums --run-dir runs/my-run --submit 8
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, taskset_config_type

from penstock.client import Attempt, PenstockClient, work

KEY_VARIABLE = "PENSTOCK_WORKER_KEY"
"""verifiers reads the gateway's key from this variable."""


class Episodes:
    """Runs the episodes of an environment. The payload of a task is the place of a verifiers task in its taskset."""

    def __init__(self, environment: vf.Env, max_tasks: int) -> None:
        self.environment = environment
        self.tasks = list(itertools.islice(environment.taskset, max_tasks))

    async def __call__(self, attempt: Attempt) -> dict[str, float]:
        """Returns the summed reward of the episode's traces, and each trace's rewards and metrics by name."""
        os.environ[KEY_VARIABLE] = attempt.api_key or "none"
        gateway = vf.EvalClientConfig(base_url=attempt.base_url, api_key_var=KEY_VARIABLE, headers=attempt.headers)
        context = vf.ModelContext(model=attempt.model, client=gateway)
        episode = await self.environment.run_episode(self.tasks[attempt.payload], context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(str(error) for error in errors) or "the episode did not complete")
        parts: dict[str, float] = {}
        for trace in episode.traces:
            parts |= {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
            parts |= {name: float(value) for name, value in trace.metrics.items() if isinstance(value, int | float)}
        return parts | {"reward": sum(trace.reward for trace in episode.traces)}


async def run(options: argparse.Namespace) -> None:
    taskset = taskset_config_type(options.taskset)(id=options.taskset)
    config = vf.SingleAgentEnvConfig(
        taskset=taskset, agent={"harness": {"id": options.harness}, "runtime": {"type": options.runtime}}
    )
    environment = load_environment(config)
    episodes = Episodes(environment, options.max_tasks)
    connect = PenstockClient.from_run_dir if options.run_dir else PenstockClient
    async with (
        connect(options.run_dir or options.url, api_key=os.environ.get("PENSTOCK_API_KEY", "")) as client,
        environment.serving(),
    ):
        if options.submit:
            await client.submit_tasks(list(range(len(episodes.tasks))), num_sessions=options.submit)
        done = await work(client, episodes, at_once=options.at_once, idle_s=options.idle_s)
        print(f"{done.rewarded} sessions rewarded, {done.failed} failed, {done.lost} lost")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("taskset", help="id of an installed taskset, or a module on PYTHONPATH")
    parser.add_argument("--harness", default="null", help="id of the harness of verifiers that plays it")
    parser.add_argument("--runtime", default="subprocess", help="where the harness runs: subprocess, docker, ...")
    parser.add_argument("--max-tasks", type=int, default=1000, help="tasks to take from the taskset")
    parser.add_argument("--run-dir", help="folder of a run on this machine")
    parser.add_argument("--url", help="a gateway; its key is read from PENSTOCK_API_KEY")
    parser.add_argument("--submit", type=int, default=0, help="submit the tasks first, with this many sessions each")
    parser.add_argument("--at-once", type=int, default=4, help="sessions at a time")
    parser.add_argument("--idle-s", type=float, default=float("inf"), help="end after this long without a task")
    options = parser.parse_args()
    if not (options.run_dir or options.url):
        parser.error("give --run-dir or --url")
    asyncio.run(run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
