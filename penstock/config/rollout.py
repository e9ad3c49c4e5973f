"""Configuration of rollout servers: engine, concurrency, agents, prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.config.agents import AdaptiveConcurrencyConfig, AgentsConfig
from penstock.config.base import Config
from penstock.config.rewards import RewardConfig


class EngineConfig(Config):
    """The inference engine of a rollout server."""

    name: Literal["auto", "vllm", "sglang", "torch"] = "auto"
    """`auto` uses vLLM if it can be imported and the torch engine otherwise, and logs which."""
    max_model_len: int = Field(default=4096, ge=8)
    """Maximum length of a prompt plus its response, in tokens."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Maximum number of samples that the engine decodes at once."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache on a CPU, in bytes. None: the engine decides. On a GPU, `gpu_memory_utilization` decides."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that the engine may use for weights and KV cache."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Number of GPUs that one server splits the model over."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs: starts faster and needs less memory, but decodes more slowly."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: vLLM on CUDA quantizes the weights whenever it loads or updates them. Its log-probs are then those of the
    quantized model, while the learner's weights stay exact: `learner.max_logprob_mismatch_nats` must allow the
    difference, and the correction mode `decoupled` accounts for it. None: no quantization."""
    keep_kv_cache: bool = True
    """Keep the KV cache of running requests through a weight update. False recomputes it with the new weights."""
    extra: dict[str, Any] = {}
    """Further engine arguments. vLLM gets them unchanged, SGLang as flags: `schedule_policy: fcfs`."""


class PromptConfig(Config):
    """The length limit of prompts in the queue, and arguments of the chat template."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in a prompt after the chat template is applied. None: one less than
    `engine.max_model_len`, so that one token can be generated."""
    overlong: Literal["filter", "truncate_left", "truncate_right", "truncate_middle"] = "filter"
    """What happens to longer prompts. `filter` moves them to the dead letters, with the reason `prompt_too_long`. The
    others remove tokens from the left, the right or the middle."""
    template_arguments: dict[str, Any] = {}
    """Further arguments of the model's chat template, such as `{enable_thinking: false}`."""


class RolloutConfig(Config):
    """The rollout servers, which generate and score samples."""

    num_servers: int = Field(default=1, ge=0, le=4096)
    """Number of servers that `penstock up` starts on this machine."""
    host: str = "127.0.0.1"
    """Address that the internal gRPC port (for weights and generation) and /metrics listen on. Anything but loopback
    needs `weights.cluster_key_file`."""
    advertise_host: str = ""
    """Address at which the learner and the gateway reach this server. Empty: `host`."""
    port: int = Field(default=0, ge=0, le=65535)
    """Internal gRPC port. 0: take a free port."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of /metrics and the probes. 0: take a free port and write it to the run's folder."""
    engine: EngineConfig = EngineConfig()
    max_concurrent_groups: int = Field(default=64, ge=1)
    """Maximum number of whole groups that a server generates at once. A group counts by the share of its samples that
    still run, so more prompts are in progress while some samples are slower than their siblings. To keep the engine
    full, use at least `engine.max_num_seqs` / `num_samples`."""
    adaptive_concurrency: AdaptiveConcurrencyConfig = AdaptiveConcurrencyConfig()
    save_every_tokens: int = Field(default=128, ge=0)
    """Number of tokens of a sample after which the new ones are saved in Redis. If the server dies, is drained or is
    preempted, another server continues the sample from there. Finished samples of unfinished groups are saved at once.
    Up to a quarter of `replay.capacity_bytes` is used. 0: nothing is saved, and a lost group is generated again."""
    prompt_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which a server gives up on a prompt and returns it to the queue. This counts as one failure
    (`replay.max_attempts`)."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline for loading the model, in seconds."""
    agents: AgentsConfig = AgentsConfig()
    tool_parser: str = ""
    """Parser of the tool calls in answers to clients (/v1/chat/completions and the like). With vLLM: the name of one of
    its tool parsers, such as `qwen3_coder` or `deepseek_v3`. Otherwise a format of `agents.tool_format`. Empty: that
    format."""
    prompt: PromptConfig = PromptConfig()
    reward: RewardConfig = RewardConfig()
