"""The commands of README.md and docs/, and a folder like a fresh clone to run them in.

Commands are those of fenced `bash` blocks. Each is run as written and must exit with 0, except for those in NOT_RUN,
each of which has its reason, and those in UNTIL_INTERRUPTED, which must start and end by Ctrl-C.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet

from penstock.cli import main as cli
from penstock.client import SyncPenstockClient
from penstock.trajectory import Prompt
from support.processes import until

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
NOT_RUN = {
    r"git clone ": "it makes the clone",
    r"make demo": "it sets up .venv by pip; test_demo.py runs the same demo",
    r"kubectl |helm (upgrade|uninstall) ": "needs a cluster; tests/cluster",
    r"(MODELS=\S+ )?docker |make images": "needs Docker; test_compose_run.py starts the same processes",
    r"\w+=\S+ penstock fetch-model ": "needs the Hub or an object store; test_fetch_model.py",
    r"torchrun --nproc-per-node 8 ": "needs 8 GPUs; test_sft_training.py runs two ranks",
    r"penstock (up my-run.yaml --host|join) |scp |sbatch ": "needs further machines; test_join.py and test_slurm.py",
    r"penstock samples --validation": "README's run validates nothing; test_samples.py",
}
"""Commands that this test leaves out, by how they begin, and why."""
UNTIL_INTERRUPTED = {
    r"penstock up my-run.yaml( --learner\.\S+ \S+)*": "learner: training",
    r"penstock up my-run.yaml --run replay .*": "console and REST at",
    r"penstock top": "step",
}
"""Commands that run until Ctrl-C, and what they print when they are up."""
SLOW = r"penstock (up my-run.yaml --check|generate|evaluate|export)"
"""Commands that import torch, which a quick test leaves out."""
NEED_STOPPED_RUN = r"penstock (export|up my-run.yaml --learner)"
"""Commands that come when README's run has stopped."""
NEED_PROGRESS = r"penstock queue "
"""Commands that need a run which trains. It is paused for the others, so that they have the CPU."""
SHOWN_FIRST = "penstock init "
MAIN_RUN = "penstock up my-run.yaml"
COMMAND_S = 600.0
CHEAP = {
    r"\bname: auto ": "name: torch",
    r"kl: \{.*\}": "kl: {placement: none}",
    r"groups_per_step: \d+": "groups_per_step: 4",
    r"max_tokens: \d+": "max_tokens: 8",
}
"""What a quick test puts in the place of settings that `penstock init` writes."""
VERL_WORDS = (
    "algorithm.adv_estimator=grpo", "data.train_files=train.parquet", "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
    "trainer.n_gpus_per_node=$GPUS",
)  # fmt: skip
READERS_FILES = {
    "run_qwen3-8b.sh": f"GPUS=8\npython3 -m verl.trainer.main_ppo {' '.join(VERL_WORDS)} $@\n",
    "config/my_grpo.yaml": "algorithm: {adv_estimator: grpo}\ndata: {train_files: train.parquet}\n",
    "run.yaml": "model: {path: examples/arithmetic/model}\nlearner: {lr: 1e-5}\nsft: {max_tokens: 64}\n",
    "reward.py": "def compute_score(**arguments):\n    return 0\n",
    "runs/other-run/metrics.jsonl": '{"step": 1, "step_s": 1, "reward_mean": 0.5, "entropy": 1, "lr": 1e-4}\n',
}
"""Files that the reader of a page has."""


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    block: int
    text: str
    is_python: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"

    @property
    def needs_progress(self) -> bool:
        return self.is_python or re.match(NEED_PROGRESS, self.text.removeprefix(".venv/bin/")) is not None

    @property
    def reason_not_to_run(self) -> str:
        return next((reason for start, reason in NOT_RUN.items() if re.match(start, self.text)), "")

    @property
    def ready_text(self) -> str | None:
        """What the command prints when it is up. None if it ends by itself."""
        bare = self.text.removeprefix(".venv/bin/")
        return next((text for command, text in UNTIL_INTERRUPTED.items() if re.fullmatch(command, bare)), None)


def commands_of(page: str) -> list[Command]:
    """The commands of a page in their order, without comments. Python programs that call a run are commands too."""
    found: list[Command] = []
    text = (ROOT / page).read_text()
    for block, match in enumerate(re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)):
        line = text[: match.start()].count("\n") + 2
        language, body = match.groups()
        if language == "python" and "from_run_dir" in body:
            found.append(Command(page, line, block, body, is_python=True))
        if language == "bash":
            found += [Command(page, line, block, command) for command in _shell_commands(body)]
    return found


def _shell_commands(body: str) -> Iterator[str]:
    """The commands of a block, without comments. One that reads a here-document ends with it."""
    lines = iter(re.sub(r" *\\\n *", " ", body).splitlines())
    for line in lines:
        command = re.sub(r"(^|\s+)# .*$|^#.*$", "", line).strip()
        if document := re.search(r"<<'(\w+)'$", command):
            command += "\n"
            while not command.endswith(f"\n{document[1]}\n"):
                command += f"{next(lines)}\n"
        if command:
            yield command


def table_of_chats() -> pyarrow.Table:
    chats = [[{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}] for n in range(64)]
    return pyarrow.table({"messages": chats})


class Clone:
    """A folder as `git clone` and `make setup` leave it, in which commands run."""

    def __init__(self, folder: Path, *, is_quick: bool) -> None:
        self.folder = folder
        self.is_quick = is_quick
        """Take the cheapest run: the torch engine, no reference model, and small steps."""
        self.processes: dict[Command, subprocess.Popen[bytes]] = {}
        self.logs: dict[Command, Path] = {}
        """What the commands that run until they are interrupted have printed."""
        for name in ("examples", "deploy", "helm"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("secrets", "__pycache__"))
        (folder / ".venv").symlink_to(sys.prefix)
        for name, text in READERS_FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        parquet.write_table(table_of_chats(), folder / "chats.parquet")
        self.environment = {**os.environ, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "COLUMNS": "200"}

    def run(self, command: Command) -> str:
        """Run a command to its end, or until it is up. Raises AssertionError with its output if it fails."""
        if command.ready_text is not None:
            self.start(command, command.ready_text)
            return ""
        text = self._with_values(command.text)
        words = [sys.executable, "-c", text] if command.is_python else ["bash", "-c", text]
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=COMMAND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        if self.is_quick and command.text.removeprefix(".venv/bin/").startswith(SHOWN_FIRST):
            self._make_cheap()
        return done.stdout

    def skips(self, command: Command) -> bool:
        is_slow = re.match(SLOW, command.text.removeprefix(".venv/bin/")) is not None
        return bool(command.reason_not_to_run) or (self.is_quick and is_slow)

    def start(self, command: Command, ready_text: str) -> None:
        log = self.logs[command] = self.folder / f"output-{len(self.processes)}.txt"
        with log.open("w") as output:
            process = subprocess.Popen(
                # A background job of a shell ignores Ctrl-C, and so would its children.
                ["env", "--default-signal=INT", "bash", "-c", f"exec {self._with_values(command.text)}"],
                cwd=self.folder, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.processes[command] = process
        deadline = time.monotonic() + COMMAND_S
        while ready_text not in log.read_text():
            assert process.poll() is None, f"{command} ended\n{log.read_text()}"
            assert time.monotonic() < deadline, f"{command} is not up\n{log.read_text()}"
            time.sleep(0.2)

    def rest(self) -> None:
        """Pause README's run once it has trained."""
        with SyncPenstockClient.from_run_dir(self.folder / "runs" / "my-run") as client:
            until(lambda: client.samples(page_size=1).samples, "a trained sample", timeout_s=COMMAND_S)
            client.pause_run()

    def resume(self) -> None:
        with SyncPenstockClient.from_run_dir(self.folder / "runs" / "my-run") as client:
            client.resume_run()

    def stop(self, command: Command) -> None:
        """Press Ctrl-C."""
        process = self.processes.pop(command)
        process.send_signal(signal.SIGINT)
        code = process.wait(COMMAND_S)
        assert code in (0, 130), f"{command} ended with {code} after Ctrl-C"

    def stop_by_order(self, command: Command) -> str:
        """Stop README's run through its gateway. Returns what it has printed."""
        self.resume()
        process = self.processes.pop(command)
        try:
            assert cli.main(["runs", "stop", "--run-dir", str(self.folder / "runs" / "my-run")]) == 0
            assert process.wait(COMMAND_S) == 0
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(COMMAND_S)
        return self.logs[command].read_text()

    def end(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(COMMAND_S)

    def dead_letter_a_prompt(self) -> None:
        """Make a dead letter, which the commands about dead letters need."""
        with SyncPenstockClient.from_run_dir(self.folder / "runs" / "my-run") as client:
            (prompt_id,) = client.submit([Prompt(messages=(("user", "1+" * 500),), priority=1)]).prompt_ids
            assert client.wait_for_prompt(prompt_id, COMMAND_S).state == "DEAD_LETTERED"

    def _make_cheap(self) -> None:
        config = self.folder / "my-run.yaml"
        text = config.read_text()
        for pattern, cheap in CHEAP.items():
            text, count = re.subn(pattern, cheap, text)
            assert count == 1, pattern
        config.write_text(text)

    def _with_values(self, text: str) -> str:
        """The command with what a reader puts in: ids, ports and names that only the run knows."""
        if "helm install" in text:
            text = text.replace("helm install", "helm template")  # as far as it gets without a cluster
        if " ID" in text:
            text = text.replace(" ID", f" {self._records('penstock queue dlq list --json')[0]['id']}")
        if "--prompt-id 17" in text:
            group = self._records("penstock queue peek --json --limit 1")[0]
            text = text.replace("--prompt-id 17", f"--prompt-id {group['prompt_id']}")
        if "PORT" in text:
            address = json.loads((self.folder / "runs" / "my-run" / "rollout-0.json").read_text())
            text = text.replace("PORT", str(address["metrics_port"]))
        if "term-000001-step-00000025" in text:
            oldest = min((self.folder / "runs" / "my-run" / "checkpoints").glob("term-*"))
            text = text.replace("term-000001-step-00000025", oldest.name)
        return text

    def _records(self, command: str) -> list[dict[str, str]]:
        """The records that a command prints, once there are any."""
        deadline = time.monotonic() + COMMAND_S
        while not (records := json.loads(self._output(command))):
            assert time.monotonic() < deadline, command
            time.sleep(0.2)
        return list(records)

    def _output(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=COMMAND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout
