"""Configuration of rollout servers: engine, concurrency, agents, prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.config.agents import AdaptiveConcurrencyConfig, AgentsConfig
from penstock.config.base import Config
from penstock.config.rewards import RewardConfig


class EngineConfig(Config):
    name: Literal["auto", "vllm", "sglang", "torch"] = "auto"
    """`auto` takes vllm where it can be imported, else torch, and says which."""
    max_model_len: int = Field(default=4096, ge=8)
    """Longest prompt plus response, in tokens."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Requests that the engine decodes at once."""
    kv_cache_bytes: int | None = None
    """KV cache size on CPU; None leaves it to the engine (on CUDA, by gpu_memory_utilization)."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    enforce_eager: bool = False
    quantization: Literal["fp8"] | None = None
    """`fp8`: vLLM on CUDA quantizes the weights when it loads them, also those of an update; log-probs are then of the
    quantized model. The learner's weights stay as they are: `learner.max_logprob_mismatch_nats` must allow the
    difference, and correction `decoupled` accounts for it."""
    keep_kv_cache: bool = True
    """Running requests keep their KV cache through a weight update; False recomputes it with the new weights."""
    extra: dict[str, Any] = {}
    """Further engine arguments, passed to vLLM unchanged, or to SGLang as flags (`schedule_policy: fcfs`)."""


class PromptConfig(Config):
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt, rendered with the chat template; None: what the model's length leaves room for one token with."""
    overlong: Literal["filter", "truncate_left", "truncate_right", "truncate_middle"] = "filter"
    """What happens to longer ones. `filter`: dead-lettered at once, as `prompt_too_long`. Or tokens are cut off on a
    side, or out of the middle."""


class RolloutConfig(Config):
    num_servers: int = Field(default=1, ge=0)
    """Servers that `penstock up` starts on this machine."""
    host: str = "127.0.0.1"
    """Address of the internal gRPC listener (weights) and of /metrics."""
    advertise_host: str = ""
    """Address under which the learner reaches this server; empty: `host`."""
    port: int = Field(default=0, ge=0, le=65535)
    """Internal gRPC port; 0 takes a free one."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Where /metrics is served; 0 takes a free port and writes it to the run's folder."""
    engine: EngineConfig = EngineConfig()
    max_concurrent_groups: int = Field(default=64, ge=1)
    """Prompts that a server works on at once, at most. Their samples end one by one: where lengths vary as most do, it
    takes over twice `engine.max_num_seqs` / samples to keep the engine full."""
    adaptive_concurrency: AdaptiveConcurrencyConfig = AdaptiveConcurrencyConfig()
    prompt_timeout_s: float = Field(default=600.0, gt=0)
    """A prompt that takes longer is given back, and counts as an attempt."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Budget for loading the model."""
    agents: AgentsConfig = AgentsConfig()
    prompt: PromptConfig = PromptConfig()
    reward: RewardConfig = RewardConfig()
