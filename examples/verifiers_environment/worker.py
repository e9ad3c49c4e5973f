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

from penstock.client import Attempt
from penstock.client.worker import run_worker, worker_parser

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
    agent = {"harness": {"id": options.harness}, "runtime": {"type": options.runtime}}
    environment = load_environment(vf.SingleAgentEnvConfig(taskset=taskset, agent=agent))
    episodes = Episodes(environment, options.max_tasks)
    async with environment.serving():
        await run_worker(options, episodes, range(len(episodes.tasks)))


def main() -> int:
    parser = worker_parser(__doc__)
    parser.add_argument("taskset", help="id of an installed taskset, or a module on PYTHONPATH")
    parser.add_argument("--harness", default="null", help="id of the harness of verifiers that plays it (null)")
    parser.add_argument("--runtime", default="subprocess", help="where the harness runs (subprocess), or docker")
    parser.add_argument("--max-tasks", type=int, default=1000, help="tasks to take from the taskset (1000)")
    asyncio.run(run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
