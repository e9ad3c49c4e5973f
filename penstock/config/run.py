"""The whole configuration of a run: one YAML file, the same for every process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field

from penstock.config.algorithms import COMPARING_ADVANTAGES
from penstock.config.base import Config
from penstock.config.dataset import DatasetConfig
from penstock.config.learner import LearnerConfig, SftConfig
from penstock.config.rollout import RolloutConfig
from penstock.config.service import DemoConfig, GatewayConfig, RedisConfig, ReplayConfig, TlsConfig
from penstock.machine import is_loopback


class WeightsConfig(Config):
    """How new weights get from the learner to the rollout servers."""

    transport: Literal["auto", "nccl", "cuda_ipc", "shm", "gloo", "snapshot"] = "auto"
    """How weights are sent. `auto` takes the fastest transport that every server in a push supports, and logs it."""
    catch_up: Literal["publisher", "snapshot"] = "publisher"
    """How a late or recovered server gets the current version: `publisher` by its own push, `snapshot` from disk."""
    delta: bool | Literal["auto"] = "auto"
    """Send only the bytes that changed, to servers that have the version before. `auto`: by `nccl` and `gloo`, if that
    was faster in this run. True: where the transport can. False: never."""
    gloo_group_size: int = Field(default=32, ge=2)
    """Maximum number of workers in a gloo group, in which all ranks connect to each other. Beyond it, the learner sends
    to one relay per group, which forwards the weights."""
    staging: Literal["auto", "host", "device"] = "auto"
    """Where the learner keeps a version until it is pushed. `auto`: on its GPU if it has one, else in host memory."""
    bucket_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Approximate size, in bytes, of the buckets that tensors are packed into."""
    ready_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that a rollout server has to answer the announcement or abort of a push before it is evicted, or 5 s if
    it cannot be reached; it then catches up alone."""
    push_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of a push, from the first bucket to the last commit."""
    snapshot_every_steps: int = Field(default=50, ge=1)
    """Number of steps between snapshots: versions as safetensors files, which late servers and rewinds load."""
    keep_snapshots: int = Field(default=2, ge=1)
    """Number of snapshots to keep. Older ones are deleted."""
    cluster_key_file: Path | None = None
    """File with the key, the same for every process, that protects the servers' internal port. None means `cluster.key`
    in the run's folder, made if missing; a server that does not listen on loopback needs a file here."""


class TracingConfig(Config):
    """OpenTelemetry traces of a prompt, from its submission to the version trained on it. Needs the extra [tracing]."""

    endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL of an OTLP collector over HTTP, such as http://collector:4318. Empty means no tracing."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of prompts that are traced."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Timeout of one export. Spans that cannot be exported are dropped, so tracing never blocks."""


class ModelConfig(Config):
    """The model that is trained."""

    path: Path
    """Folder with a Hugging Face checkpoint (config.json, safetensors files and tokenizer), or a Hub id such as
    `Qwen/Qwen2.5-0.5B-Instruct`, with an optional revision (`…@main`). A path that exists is never looked up on the
    Hub."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type in which the engines compute and in which weights are pushed."""


class RunConfig(Config):
    """The configuration of a whole run. Every process reads the same file and uses the sections it needs."""

    run: str = Field(default="run", pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")
    """Name of the run. It is part of every Redis key, so that several runs can share one Redis."""
    run_dir: Path = Path("runs")
    """Folder of all runs. The checkpoints, logs and private Redis of run NAME are in run_dir/NAME."""
    cache_dir: Path | None = None
    """Folder of the graphs and kernels that processes compile, for all runs. None means `_cache` in run_dir."""
    seed: int = 1
    """Seed of sampling, data order and the learner."""
    max_restarts: int = Field(default=5, ge=0)
    """How many times `penstock up` restarts a rollout server, the gateway or the feed, after 1 s, 2 s, 4 s and so on,
    before it ends the run. A process that has run for 10 minutes has all its restarts again."""
    model: ModelConfig
    dataset: DatasetConfig = DatasetConfig()
    redis: RedisConfig = RedisConfig()
    tls: TlsConfig = TlsConfig()
    replay: ReplayConfig = ReplayConfig()
    gateway: GatewayConfig = GatewayConfig()
    rollout: RolloutConfig = RolloutConfig()
    weights: WeightsConfig = WeightsConfig()
    learner: LearnerConfig = LearnerConfig()
    sft: SftConfig = SftConfig()
    tracing: TracingConfig = TracingConfig()
    demo: DemoConfig = DemoConfig()

    def refused(self) -> tuple[tuple[object, str], ...]:
        reward, reward_model = self.rollout.reward, self.learner.reward_model
        kinds = {chosen.kind for chosen in (*reward.by_data_source.values(), reward.default)}
        compares = self.replay.dynamic_sampling or self.replay.group_filter.looks_at_rewards
        advantage, url = self.learner.algorithm.advantage.name, urlsplit(self.redis.url)
        return (
            ("reward_model" in kinds and reward_model is None,
             "a reward of kind reward_model needs the learner's reward model: add learner.reward_model.path"),
            (compares and reward_model is not None and reward_model.combine == "replace",
             "replay.dynamic_sampling and group_filter compare the rewards of the rollout servers, which "
             "learner.reward_model replaces: turn one of them off"),
            (self.dataset.file is not None and self.dataset.num_samples == 1 and advantage in COMPARING_ADVANTAGES,
             f"advantage {advantage} compares the samples of a prompt, so with one it trains nothing: raise "
             "dataset.num_samples, or choose grpo"),
            (self.tls.files and url.scheme == "redis" and not is_loopback(url.hostname or ""),
             "tls encrypts the calls to Redis, too: set redis.url to a rediss:// one"),
            (self._ray_is_redis,
             f"learner.ray_address {self.learner.ray_address} is the address of redis.url; give the one of Ray's head, "
             "and start that with another --port than 6379, such as 6380"),
        )  # fmt: skip

    @property
    def _ray_is_redis(self) -> bool:
        host, _, port = self.learner.ray_address.rpartition(":")
        try:
            url = urlsplit(self.redis.url)
            is_same_host = bool(host) and host.strip("[]").lower() == url.hostname
            return is_same_host and int(port) == (url.port or 6379)
        except ValueError:  # of a port that is not a number: Redis' client explains it
            return False

    @property
    def certificates_of_redis(self) -> dict[str, Path]:
        """What Redis' settings take from `tls`, by their paths. Redis' own certificates come first."""
        redis = self.redis
        if urlsplit(redis.url).scheme != "rediss" or redis.tls_ca_file or redis.tls_cert_file:
            return {}
        names = ("redis.tls_ca_file", "redis.tls_cert_file", "redis.tls_key_file")
        return dict(zip(names, self.tls.files, strict=False))

    @property
    def folder(self) -> Path:
        """Folder of this run: checkpoints, logs, metrics and the addresses of its processes."""
        return self.run_dir / self.run

    @property
    def cache_folder(self) -> Path:
        """Folder of compiled code. No run can have the name of the default one."""
        return self.cache_dir or self.run_dir / "_cache"
