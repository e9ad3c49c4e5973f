"""A whole run on one GPU: Redis, Ray, the learner's roles, two vLLM servers and the feed, as processes of their own.

NCCL refuses two ranks on one GPU of one host. A `sitecustomize` on the path of every process makes each say that it is
a host of its own.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from harness import gpu_use

sys.path.insert(0, str(Path(__file__).parents[2]))

from penstock.config.loading import dump_config, load_config
from penstock.config.run import RunConfig
from penstock.machine import free_port, wait_for_port
from penstock_tools.local.private_redis import find_redis_server, write_config
from penstock_tools.local.processes import ProcessGroup
from soak_parts.lineage import Lineage
from soak_parts.processes import Part

ROOT = Path(__file__).parents[3]
PRESET = ROOT / "examples" / "arithmetic" / "ppo.yaml"
SERVERS = ("rollout-0", "rollout-1")
HOST_ID = """import os

os.environ["NCCL_HOSTID"] = f"pid-{os.getpid()}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")
"""
ENGINE_IS_UP = re.compile(r" STALE at version| READY at version")
PUSH_PHASES = ("announce", "transfer", "receive", "commit", "load", "pause")
POLL_S = 0.05
SAMPLE_S = 1.0


def settings_of(placement: str, folder: Path, num_steps: int, engine: str) -> dict[str, str]:
    """The preset with several ranks of every role on the GPU, and two servers."""
    gpus = "0.05" if engine == "vllm" else "0"
    kv_cache = {"rollout.engine.extra": '{"kv_cache_memory_bytes": 2147483648}'} if engine == "vllm" else {}
    roles = {"policy": 2, "reference": 1, "critic": 2, "reward_model": 1}
    return {
        "run": f"loop-{placement}",
        "run_dir": str(folder),
        "model.dtype": "bfloat16" if engine == "vllm" else "float32",
        "rollout.num_servers": str(len(SERVERS)),
        "rollout.engine.name": engine,
        "rollout.engine.gpu_memory_utilization": "0.15",
        **kv_cache,
        "weights.transport": "nccl" if engine == "vllm" else "auto",
        "weights.ready_timeout_s": "5",
        "weights.push_timeout_s": "20",
        "learner.placement": placement,
        "learner.num_steps": str(num_steps),
        "learner.spare_ranks": "true",
        "learner.checkpoint.every_steps": "5",
        "learner.rank_timeout_s": "60",
        "learner.reward_model.path": str(folder / "reward-model"),
        "learner.reward_model.coefficient": "0.01",
        "replay.lease_ttl_s": "5",
        **{f"learner.{role}.num_ranks": str(number) for role, number in roles.items()},
        **{f"learner.{role}.gpus_per_rank": gpus for role in roles},
    }


def write_reward_model(folder: Path) -> None:
    """A classifier with random weights and the policy's tokenizer. Its scores count for little."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    policy = ROOT / "examples" / "arithmetic" / "model"
    config = AutoConfig.from_pretrained(policy, num_labels=1, pad_token_id=0)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(policy / name, folder / name)


@dataclass
class Samples:
    """What was seen of the run while it went on."""

    gpu_percent: list[float] = field(default_factory=list)
    gpu_used_mb: list[float] = field(default_factory=list)
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    """For each process, the last values of its sums and counts."""


class LoopRun:
    """Starts every part, keeps them up, and ends them all with `stop`."""

    def __init__(self, folder: Path, placement: str, num_steps: int, engine: str = "vllm") -> None:
        self.folder = folder
        write_reward_model(folder / "reward-model")
        self.config, self.parts = make_parts(folder, settings_of(placement, folder, num_steps, engine))
        self.processes = ProcessGroup(folder / "logs")
        self.lineage = Lineage(folder / "logs" / "learner.log")
        self.samples = Samples()
        self.started_at = self.engines_up_at = 0.0
        self._next_sample = 0.0

    @property
    def num_steps(self) -> int:
        """Number of the newest step that was trained."""
        return self.lineage.trained[-1].step if self.lineage.trained else 0

    @property
    def first_step_s(self) -> float:
        """Seconds from the moment when both engines were up to the end of the first step."""
        return self.lineage.trained[0].at - self.engines_up_at

    def start(self) -> None:
        self.started_at = time.monotonic()
        for name, part in self.parts.items():
            part.start(self.processes)
            if name in ("redis", "ray") and not wait_for_port("127.0.0.1", _port_of(part), timeout_s=60):
                raise SystemExit(f"{name} did not start; see {self.processes.log_folder}")
        self.lineage.begin_start(time.monotonic())

    def poll(self) -> bool:
        """Restart what ended, and look at the run. Returns whether the learner has finished."""
        now = time.monotonic()
        learner = self.parts["learner"]
        if learner.child is not None and learner.child.exit_code == 0:
            self.lineage.poll(now)
            return True
        for part in self.parts.values():
            part.keep_up(self.processes)
        self.lineage.poll(now)
        if not self.engines_up_at and all(self._is_up(server) for server in SERVERS):
            self.engines_up_at = now
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_S
            self._sample()
        return False

    def watch(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Poll until `is_over`, or until the learner has finished. Returns whether it was in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.poll() or is_over():
                return True
            time.sleep(POLL_S)
        return False

    def history(self) -> list[dict[str, float]]:
        """The metrics of each step of the final lineage."""
        path = self.config.folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return list({int(row["step"]): row for row in rows}.values())

    def push_seconds(self) -> dict[str, float]:
        """Mean seconds of each phase of a push."""
        values = self.samples.counters.get("learner", {})
        return {
            phase: _mean(values, "penstock_weight_sync_duration_seconds", phase)
            for phase in PUSH_PHASES
            if _mean(values, "penstock_weight_sync_duration_seconds", phase)
        }

    def group_seconds(self) -> float:
        """Mean seconds from the lease of a prompt to its finished group."""
        means = [_mean(self.samples.counters.get(name, {}), "penstock_rollout_episode_duration_seconds", "")
                 for name in SERVERS]  # fmt: skip
        return max(means)

    def stop(self) -> None:
        self.processes.stop()

    def _is_up(self, server: str) -> bool:
        log = self.folder / "logs" / f"{server}.log"
        return log.exists() and bool(ENGINE_IS_UP.search(log.read_text(errors="replace")))

    def _sample(self) -> None:
        for component in ("learner", *SERVERS):
            endpoint = self.config.folder / f"{component}.json"
            try:
                port = json.loads(endpoint.read_text())["metrics_port"]
                self.samples.counters[component] = _scrape(port)
            except (OSError, ValueError, KeyError, httpx.HTTPError):
                continue
        if self.lineage.trained and (used := gpu_use()) is not None:
            self.samples.gpu_percent.append(used[0])
            self.samples.gpu_used_mb.append(used[1])


def make_parts(folder: Path, settings: dict[str, str]) -> tuple[RunConfig, dict[str, Part]]:
    """The run's config and its parts, in the order of their start."""
    ray_port = free_port()
    redis_config, url = write_config(folder / "redis", free_port())
    key = folder / "cluster.key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    settings = settings | {
        "weights.cluster_key_file": str(key), "learner.ray_address": f"127.0.0.1:{ray_port}",
        "learner.publish_host": "127.0.0.1", "gateway.port": str(free_port()),
    }  # fmt: skip
    config = load_config(PRESET, [word for name, value in settings.items() for word in (f"--{name}", value)])
    config = config.model_copy(update={"redis": config.redis.model_copy(update={"url": url})})
    config.folder.mkdir(parents=True, exist_ok=True)
    config_file = folder / "run.yaml"
    config_file.touch(mode=0o600)
    config_file.write_text(dump_config(config))
    (folder / "host-id").mkdir()
    (folder / "host-id" / "sitecustomize.py").write_text(HOST_ID)
    environment = {
        "PYTHONPATH": f"{folder / 'host-id'}:{os.environ.get('PYTHONPATH', '')}",
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip

    def penstock(name: str, module: str, *arguments: str, stop_timeout_s: float = 30) -> Part:
        command = [sys.executable, "-m", module, "--config", str(config_file), *arguments]
        return Part(name, command, environment, stop_timeout_s)

    num_gpus = 1 if config.learner.policy.gpus_per_rank else 0
    ray = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address=127.0.0.1",
        f"--port={ray_port}", "--num-cpus=16", f"--num-gpus={num_gpus}", "--object-store-memory=268435456",
        "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder / 'ray'}",
    ]  # fmt: skip
    parts = [
        Part("redis", [find_redis_server(), str(redis_config)]),
        *(penstock(server, "penstock_rollout", "--server-id", server) for server in SERVERS),
        Part("ray", ray, environment),
        penstock("learner", "penstock_learner", stop_timeout_s=60),
        penstock("feed", "penstock.cli.commands.feed"),
    ]
    return config, {part.name: part for part in parts}


def _port_of(part: Part) -> int:
    """The port of Redis or of Ray's head."""
    for word in part.command:
        if word.startswith("--port="):
            return int(word.removeprefix("--port="))
    lines = Path(part.command[1]).read_text().splitlines()
    return int(next(line for line in lines if line.startswith("port ")).split()[1])


def _scrape(port: int) -> dict[str, float]:
    """Sums and counts of a process's histograms, by name and phase."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=2).text):
        for sample in family.samples:
            if sample.name.endswith(("_sum", "_count")):
                key = f"{sample.name} {sample.labels.get('phase', '')}"
                values[key] = values.get(key, 0.0) + sample.value
    return values


def _mean(values: dict[str, float], name: str, phase: str) -> float:
    count = values.get(f"{name}_count {phase}", 0.0)
    return values.get(f"{name}_sum {phase}", 0.0) / count if count else 0.0
