"""Configuration of rollout servers: engine, concurrency, agents, prompts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from penstock.config.base import Config
from penstock.reward_bounds import MAX_REWARD


class ToolSettings(Config):
    """Settings that every built-in tool has."""

    description: str | None = Field(default=None, min_length=1)
    """What the model reads about the tool. None means the tool's own description."""
    max_wait_s: float = Field(default=300.0, gt=0)
    """How long a call waits for its turn, before it fails."""


class SandboxLimits(Config):
    """Limits of each program, or test, that the sandbox runs, and what isolates it."""

    memory_bytes: int = Field(default=2**30, ge=2**26)
    """Maximum memory in bytes: of each process (its address space), and of all its processes together."""
    file_bytes: int = Field(default=2**24, ge=0)
    """Largest file, in bytes, that it may write to its private folder."""
    folder_bytes: int = Field(default=2**26, ge=2**16)
    """Maximum size of all its files together, in bytes."""
    max_processes: int = Field(default=16, ge=1)
    """Maximum number of its processes and threads."""
    confinement: Literal["auto", "bubblewrap", "builtin"] = "auto"
    """`bubblewrap` needs the program bwrap and a host that allows user namespaces, or root. `builtin` needs Landlock
    and seccomp. `auto`: bubblewrap, which must be installed; builtin where it cannot start, as in pods without user
    namespaces."""
    allow_unisolated: bool = False
    """Run even if nothing can isolate it here: code of a model can then reach the network, the disk and processes."""


class PythonTool(ToolSettings, SandboxLimits):
    """Runs a Python program of the model in the sandbox of code rewards, and shows what it printed and the value of a
    last expression. Every call is a new program: nothing is kept."""

    kind: Literal["python"]
    timeout_s: float = Field(default=10.0, gt=0)
    """Limit of one program, of wall-clock and of CPU time."""
    num_processes: int = Field(default=4, ge=1, le=1024)
    """Maximum number of programs of one rollout server that run at the same time. Further calls wait."""
    output_bytes: int = Field(default=2**20, ge=1)
    """Maximum output of a program in bytes. A program that prints more is ended."""


class SearchTool(ToolSettings):
    """Finds passages for a query: in a local index by BM25, or through a retrieval service."""

    kind: Literal["search"]
    index: Path | None = None
    """Folder of `penstock search-index`, or a JSONL or Parquet file of passages to index at start. None uses `url`."""
    url: str | None = Field(default=None, pattern=r"^https?://")
    """Retrieval service with Search-R1's requests, such as `http://127.0.0.1:8000/retrieve`. None uses `index`."""
    top_k: int = Field(default=3, ge=1)
    """Number of passages for one query."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of one search. Connection errors, 429 and 5xx of a service are retried until then."""
    max_concurrent: int = Field(default=64, ge=1)
    """Maximum number of searches of one rollout server at the same time. Further calls wait."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        return (((self.index is None) == (self.url is None), "give either `index` or `url`"),)


class McpServer(Config):
    """An MCP server, whose tools are offered to the model: a program that the rollout server starts, or a URL."""

    command: list[str] = []
    """Program, with arguments, that each rollout server starts and talks to over stdin and stdout. Empty uses `url`."""
    url: str | None = Field(default=None, pattern=r"^https?://")
    """Address of a server that talks over HTTP, such as `http://127.0.0.1:8000/mcp`. Without it, `command` is used."""
    transport: Literal["streamable_http", "sse"] = "streamable_http"
    """How a server with a `url` talks: Streamable HTTP, or the older HTTP with server-sent events."""
    env: dict[str, str] = {}
    """Environment variables of the program, in addition to PATH, HOME and the like."""
    pass_env: list[str] = []
    """Names of environment variables of the rollout server that the program gets too, such as a token's."""
    folder: Path | None = None
    """Working directory of the program. None means the rollout server's."""
    headers: dict[str, str] = {}
    """HTTP headers of requests to `url`."""
    api_key_file: Path | None = None
    """File with the key that is sent to `url` as `Authorization: Bearer …`. None means no key."""
    tools: list[str] | None = None
    """Names of the tools to offer. None means all that the server has."""
    prefix: str = ""
    """Text in front of the names that the model calls, if the tools of two servers have the same names."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of one call, with the time for a new connection if the old one broke."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """Deadline for connecting and listing the tools at start."""
    max_concurrent: int = Field(default=64, ge=1)
    """Maximum number of calls of one rollout server at the same time. Further calls wait."""
    max_wait_s: float = Field(default=300.0, gt=0)
    """How long a call waits for its turn, before it fails."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        return ((bool(self.command) == (self.url is not None), "give either `command` or `url`"),)


BuiltInTool = Annotated[PythonTool | SearchTool, Field(discriminator="kind")]


class AgentsConfig(Config):
    """Tools, interactions, custom agents, and the limits of multi-turn samples."""

    default_agent: str = Field(default="single_turn_agent", min_length=1)
    """Agent of prompts without `agent_name`: a built-in one or one of `custom`."""
    tools_file: Path | None = None
    """YAML file of tools of `tool_agent`, in verl's format (class_name, config, tool_schema). None means no tools."""
    tools: dict[str, BuiltInTool] = {}
    """Built-in tools of `tool_agent`, by the name that the model calls: `{code_interpreter: {kind: python}}`."""
    mcp_servers: dict[str, McpServer] = {}
    """MCP servers whose tools `tool_agent` offers too, by a name for messages."""
    interactions_file: Path | None = None
    """YAML file of the interactions, in verl's format (name, class_name, config). None means no interactions."""
    custom: dict[str, str] = {}
    """Your own agents by the name in a prompt, as `package.module:function` or `path/file.py:function`."""
    tool_format: str = "hermes"
    """Format of the model's tool calls: `hermes`, `llama3_json`, `openai`, or your own parser as
    `package.module:function` or `path/file.py:function`."""
    show_tools: Literal["template", "prompt", "own"] = "template"
    """What shows tools to the model: the chat `template`, refused if it does not; the system message of the `prompt`,
    for the gateway's clients too; or your `own` prompts, which nothing checks."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum number of assistant turns in one sample. A sample that reaches it ends with finish reason `length`."""
    max_user_turns: int | None = Field(default=None, ge=1)
    """Maximum number of replies to the model in one sample: tool results of one turn, or a reply of the interaction.
    None means only `max_turns` limits them."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in one assistant turn. None means whatever the response's `max_tokens` has left."""
    max_calls_per_turn: int = Field(default=8, ge=1)
    """Maximum number of concurrent tool calls in one turn (verl's `max_parallel_calls`). Others are refused."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of each call into a tool or an interaction. Built-in tools have their own deadlines."""
    tool_timeouts_s: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Deadlines of single tools, by their names. They replace `tool_timeout_s`."""
    max_tool_response_chars: int = Field(default=4096, ge=1)
    """Characters that are kept of a longer tool response, with a note (verl's `max_tool_response_length`)."""
    tool_response_keep: Literal["head", "tail", "both"] = "head"
    """Part of a longer tool response that is kept (verl's `tool_response_truncate_side`: left, right, middle)."""
    scored_text: Literal["response", "last_turn"] = "response"
    """Text that the reward function gets: the whole response including tool output, or the last assistant turn."""
    turn_rewards: Literal["sum", "replace", "last", "record"] = "sum"
    """How rewards of tools and interactions join the reward function's: `sum` adds all, `replace` ignores the function,
    `last` takes the final reward (or the last turn's if there is none), `record` only keeps them in `reward_parts`, as
    in verl."""


class AdaptiveConcurrencyConfig(Config):
    """Lowers the number of concurrent groups, at most `max_concurrent_groups`, while the engine is overloaded."""

    enabled: bool = True
    """False keeps `max_concurrent_groups` groups in progress at all times."""
    max_kv_usage: float = Field(default=0.95, gt=0, le=1)
    """The engine counts as overloaded while requests wait and more than this share of its KV cache is in use."""
    max_queue_s: float = Field(default=5.0, gt=0)
    """The engine also counts as overloaded when, for this many seconds, more than half as many requests wait as run."""


class RewardSettings(Config):
    """Settings that every kind of reward has."""

    timeout_s: float | None = Field(default=None, gt=0)
    """Deadline of one reward. None means `rollout.reward.timeout_s`."""


class ExactMatchReward(RewardSettings):
    """1 if the response equals the ground truth, ignoring white space at both ends; otherwise 0."""

    kind: Literal["exact_match"] = "exact_match"


class RegexReward(RewardSettings):
    """1 if the last match of a pattern is right, otherwise 0."""

    kind: Literal["regex"]
    pattern: str
    """Pattern to search. Its group 1 must equal the ground truth; without a group, any match is right."""
    ignore_case: bool = False
    """Ignore case, in the pattern and in the comparison with the ground truth."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from error
        return pattern


class Gsm8kReward(RewardSettings):
    """GSM8K's convention: the answer is the number after `####`."""

    kind: Literal["gsm8k"] = "gsm8k"
    method: Literal["strict", "flexible"] = "strict"
    """`strict` takes the number after the last `####`, `flexible` the last number near the end of the response."""
    correct_score: float = 1.0
    """Score of a correct answer."""
    format_score: float = 0.1
    """Score of an answer that is well-formed but wrong. A response without an answer gets 0."""


class MathReward(RewardSettings):
    """Compares the answer, usually in `\\boxed{}`, with the ground truth as an expression, by math-verify."""

    kind: Literal["math"] = "math"
    correct_score: float = 1.0
    """Score of a correct answer."""
    wrong_score: float = 0.0
    """Score of a wrong or missing answer. DAPO's recipe uses -1."""


class SearchQaReward(RewardSettings):
    """1 if the text in the last `<answer>` tag equals a wanted answer, ignoring case, punctuation and articles;
    otherwise 0. The ground truth is an answer, a list, or `{target: ...}`, as in Search-R1."""

    kind: Literal["search_qa"]


class VerlReward(RewardSettings):
    """The number that verl's built-in reward gives."""

    kind: Literal["verl"]
    rule: Literal["gsm8k", "math", "math_dapo", "geometry3k", "search_qa"]
    """verl's rule: `gsm8k`, `math` (by normalized text) and `search_qa` give 1 or 0, `math_dapo` 1 or -1, `geometry3k`
    0.9 for the answer and 0.1 for the format."""


class CodeReward(RewardSettings, SandboxLimits):
    """Runs the last fenced Python block of the response against tests, in a sandboxed process."""

    kind: Literal["code"] = "code"
    partial_credit: bool = True
    """Score the share of tests that pass. False: 1 if all pass, otherwise 0."""
    compat: Literal["none", "verl"] = "none"
    """`verl`: only blocks fenced as "```python" count, outputs are compared as verl does (as text, or as numbers if
    every line is one), and tests that call a function give 1 or 0. With `max_tests: 10` and `test_timeout_s: 10`, it is
    verl's `prime_code`."""
    max_tests: int | None = Field(default=None, ge=1)
    """Maximum number of tests to run, from the first on. None means all."""
    test_timeout_s: float = Field(default=5.0, gt=0)
    """Limit of one test, of wall-clock and of CPU time. Tests that `timeout_s` leaves no time for fail."""
    output_bytes: int = Field(default=2**22, ge=1)
    """Maximum output of a test in bytes. A test that prints more fails."""


class FunctionReward(RewardSettings):
    """Your own Python function."""

    kind: Literal["function"]
    file: Path
    """Python file that defines the function."""
    name: str = "compute_score"
    """Function with verl's signature (data_source, solution_str, ground_truth and extra_info, by name), or a class:
    each reward process makes one object of it, with `kwargs`, and calls that."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments, like verl's reward_kwargs."""
    batch: bool = False
    """Call it once for all samples of a prompt, as verl's `batch` manager does, with lists: data_sources,
    solution_strs, ground_truths and extra_infos."""

    def __hash__(self) -> int:
        return hash((self.file, self.name))


class RemoteReward(RewardSettings):
    """An HTTP service: gets data_source, solution_str, ground_truth and extra_info as JSON, returns a number or
    {"score": ...}."""

    kind: Literal["remote"]
    url: str = Field(pattern=r"^https?://")
    """Address that requests are POSTed to."""
    attempt_timeout_s: float = Field(default=10.0, gt=0)
    """Timeout of one attempt. Connection errors, 429 and 5xx are retried until the reward's deadline."""
    max_concurrent: int = Field(default=64, ge=1)
    """Maximum number of concurrent requests of one rollout server."""
    api_key_file: Path | None = None
    """File with the key that is sent as `Authorization: Bearer …`. None means no key."""


class RewardModelReward(RewardSettings):
    """0 from the rollout server: the learner's reward model scores the sample before it is trained on. A validation has
    the 0 under `reward`, and the model's score under `combined_reward`."""

    kind: Literal["reward_model"]


Reward = Annotated[
    ExactMatchReward
    | RegexReward
    | Gsm8kReward
    | MathReward
    | SearchQaReward
    | VerlReward
    | CodeReward
    | FunctionReward
    | RemoteReward
    | RewardModelReward,
    Field(discriminator="kind"),
]


class RewardConfig(Config):
    """How rollout servers score samples."""

    by_data_source: dict[str, Reward] = {}
    """Reward by data source, a name or a pattern: `{aime*: {kind: math}}`. The fields below are for all others."""
    function_file: Path | None = None
    """Python file with your own reward function, for data sources that `by_data_source` does not name. None means the
    built-in table, then `default`."""
    function_name: str = "compute_score"
    """Function with verl's signature: data_source, solution_str, ground_truth and extra_info, passed by name."""
    function_kwargs: dict[str, Any] = {}
    """Further keyword arguments, like verl's reward_kwargs."""
    function_batch: bool = False
    """Call the function once for all samples of a prompt, with lists, as verl's `batch` manager does."""
    compat: Literal["none", "verl"] = "none"
    """`verl`: the built-in table gives verl's numbers, with its format scores and DAPO's -1."""
    default: Reward = ExactMatchReward()
    """Reward of data sources that have no other, here or in the built-in table. The server logs each of them once."""
    num_processes: int = Field(default=4, ge=1, le=1024)
    """Maximum number of processes that compute rewards for one server."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of one reward, from when a process starts on it. The process is then killed and replaced."""
    error_value: float = Field(default=0.0, ge=-MAX_REWARD, le=MAX_REWARD)
    """Reward of a sample whose reward failed or timed out (counted in `penstock_reward_errors_total`)."""
    max_failed_share: float | None = Field(default=1.0, gt=0, le=1)
    """The run pauses when this share of a step's rewards fails; groups with a failed sample are then sampled again
    instead of trained. Below it, failed samples are trained with `error_value`. None means it never pauses."""


class EngineConfig(Config):
    """The inference engine of a rollout server."""

    name: Literal["auto", "vllm", "sglang", "torch"] = "auto"
    """`auto` uses vLLM if it can be imported and the torch engine otherwise, and logs which."""
    max_model_len: int = Field(default=4096, ge=8)
    """Maximum length of a prompt plus its response, in tokens."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Maximum number of samples that the engine decodes at once."""
    kv_cache_bytes: int | None = None
    """Bytes of the KV cache on a CPU (on a GPU, see `gpu_memory_utilization`). None means the engine decides."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that the engine may use for weights and KV cache."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Number of GPUs that one server splits the model over."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs: starts faster and needs less memory, but decodes more slowly."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: vLLM on CUDA quantizes the weights whenever it loads them. `learner.max_logprob_mismatch_nats` must allow
    the difference, for which the correction mode `decoupled` accounts. None means no quantization."""
    keep_kv_cache: bool = True
    """Keep the KV cache of running requests through a weight update. False recomputes it with the new weights."""
    profile_versions: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Policy versions of which vLLM's torch profiler records the first 100 steps. Empty means none."""
    extra: dict[str, Any] = {}
    """Further engine arguments. vLLM gets them unchanged, SGLang as flags: `schedule_policy: fcfs`."""


class PromptConfig(Config):
    """The length limit of prompts in the queue, and arguments of the chat template."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in a rendered prompt. None means one less than `engine.max_model_len`."""
    overlong: Literal["filter", "truncate_left", "truncate_right", "truncate_middle"] = "filter"
    """`filter` dead-letters longer prompts (`prompt_too_long`); the others cut tokens at that side or in the middle."""
    template_arguments: dict[str, Any] = {}
    """Further arguments of the model's chat template, such as `{enable_thinking: false}`."""


class RolloutConfig(Config):
    """The rollout servers, which generate and score samples."""

    num_servers: int = Field(default=1, ge=0, le=4096)
    """Number of servers that `penstock up` starts on this machine."""
    host: str = "127.0.0.1"
    """Address of the gRPC port and /metrics. Anything but loopback needs `weights.cluster_key_file`."""
    advertise_host: str = ""
    """Address at which the learner and the gateway reach this server. Empty means `host`."""
    port: int = Field(default=0, ge=0, le=65535)
    """Internal gRPC port. 0 takes a free port."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of /metrics and the probes. 0 takes a free port and writes it to the run's folder."""
    engine: EngineConfig = EngineConfig()
    max_concurrent_groups: int = Field(default=64, ge=1)
    """Maximum number of whole groups that a server generates at once; a group counts by the share of its samples that
    still run. To keep the engine full, use at least `engine.max_num_seqs` / `num_samples`."""
    adaptive_concurrency: AdaptiveConcurrencyConfig = AdaptiveConcurrencyConfig()
    save_every_tokens: int = Field(default=128, ge=0)
    """New tokens of a sample are saved in Redis after this many, so that another server can continue it if this one
    dies or is drained. They use up to a quarter of `replay.capacity_bytes`. 0 saves nothing."""
    prompt_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which a server returns a prompt to the queue, as one failure (`replay.max_attempts`)."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline for loading the model."""
    agents: AgentsConfig = AgentsConfig()
    tool_parser: str = ""
    """Parser of tool calls in answers to clients: one of vLLM's tool parsers, such as `qwen3_coder`, or a format of
    `agents.tool_format`. Empty means that format."""
    prompt: PromptConfig = PromptConfig()
    reward: RewardConfig = RewardConfig()
