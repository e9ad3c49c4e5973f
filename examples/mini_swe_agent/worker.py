"""mini-swe-agent, unchanged, repairs small repositories; the model that it calls is trained.

python examples/mini_swe_agent/worker.py --run-dir runs/my-run
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # a worker may have no internet
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.models.litellm_model import LitellmModel

from penstock.client import Attempt
from penstock.client.worker import run_worker, worker_parser

TASKS = Path(__file__).with_name("tasks.jsonl")
SYSTEM = "You repair a small repository. Run one shell command at a time with the tool `bash`."
TASK = (
    "{{task}}\nThe repository is the current folder. When it is repaired, run "
    "`echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT` and nothing else."
)
SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib64", "/etc")
CONFINED = [
    "--as=2000000000", "--cpu=30", "--fsize=100000000", "--core=0", "bwrap",
    *(word for folder in SYSTEM_FOLDERS for word in ("--ro-bind-try", folder, folder)),
    "--unshare-all", "--die-with-parent", "--new-session", "--tmpfs", "/tmp", "--proc", "/proc", "--dev", "/dev",
    "--clearenv", "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin",
]  # fmt: skip
"""Arguments of prlimit, which limits memory, CPU time and files, and of bubblewrap, which it starts: commands see the
system, and change the repository alone. They have no network. Penstock's own sandbox for rewards and tools sets the
same bounds, but gives every program a new folder, and an agent needs the one that its last command left."""
TEST_FILE = "hidden_test.py"


def attempt(task: Attempt) -> float:
    """Let the agent repair the repository. The reward is 1 if the hidden test passes."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), task.payload["files"])
        environment = BubblewrapEnvironment(cwd=folder, executable="prlimit", wrapper_args=CONFINED, timeout=30)
        agent = DefaultAgent(
            model_of(task), environment, system_template=SYSTEM, instance_template=TASK, step_limit=12, cost_limit=0
        )
        agent.run(task.payload["problem"])
        write_files(Path(folder), {TEST_FILE: task.payload["test"]})
        return float(environment.execute({"command": f"python3 {TEST_FILE}"})["returncode"] == 0)


def model_of(task: Attempt) -> LitellmModel:
    gateway = {"api_base": task.base_url, "api_key": task.api_key, "extra_headers": task.headers}
    return LitellmModel(model_name=f"openai/{task.model}", cost_tracking="ignore_errors", model_kwargs=gateway)


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


def main() -> int:
    payloads: list[Any] = [json.loads(line) for line in TASKS.read_text().splitlines()]
    asyncio.run(run_worker(worker_parser(__doc__).parse_args(), attempt, payloads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
