"""Configuration of rollout servers: engine, concurrency, agents, prompts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.config.base import Config
from penstock.reward_bounds import MAX_REWARD

# ── Configuration of the built-in tools that agents offer, by kind, and of MCP servers ──


class ToolSettings(Config):
    """Settings that every built-in tool has."""

    description: str | None = Field(default=None, min_length=1)
    """What the model reads about the tool. None: the tool's own description."""


class PythonTool(ToolSettings):
    """Runs a Python program of the model in the sandbox of code rewards, and shows what it printed. The value of a last
    expression is printed too, as in an interactive interpreter. Every call is a new program: nothing is kept."""

    kind: Literal["python"]
    timeout_s: float = Field(default=10.0, gt=0)
    """Limit of one program in seconds, of wall-clock and of CPU time."""
    num_processes: int = Field(default=4, ge=1, le=1024)
    """Maximum number of programs of one rollout server that run at the same time. Further calls wait."""
    max_wait_s: float = Field(default=300.0, gt=0)
    """How long a call waits for its turn, in seconds, before it fails."""
    memory_bytes: int = Field(default=2**30, ge=2**26)
    """Maximum memory of a program in bytes: of each process (its address space), and of all its processes together."""
    file_bytes: int = Field(default=2**24, ge=0)
    """Largest file, in bytes, that a program may write to its private folder."""
    folder_bytes: int = Field(default=2**26, ge=2**16)
    """Maximum size of all files of a program together, in bytes."""
    output_bytes: int = Field(default=2**20, ge=1)
    """Maximum output of a program in bytes. A program that prints more is ended."""
    max_processes: int = Field(default=16, ge=1)
    """Maximum number of processes and threads of one program."""
    confinement: Literal["auto", "bubblewrap", "builtin"] = "auto"
    """What isolates the programs, as in the reward of kind `code`."""
    allow_unisolated: bool = False
    """Run programs even if nothing can isolate them on this machine. Code that a model has written can then reach the
    network, the disk and this user's other processes."""


class SearchTool(ToolSettings):
    """Finds passages for a query: in a local index by BM25, or through a retrieval service."""

    kind: Literal["search"]
    index: Path | None = None
    """Local index: a folder that `penstock search-index` wrote, or a file of passages (JSONL or Parquet), which is
    indexed in memory at start. None: use `url`."""
    url: str | None = Field(default=None, pattern=r"^https?://")
    """Address of a retrieval service that takes Search-R1's requests, such as `http://127.0.0.1:8000/retrieve`. None:
    use `index`."""
    top_k: int = Field(default=3, ge=1)
    """Number of passages for one query."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of one search in seconds. Connection errors, 429 and 5xx of a service are retried until then."""
    max_concurrent: int = Field(default=64, ge=1)
    """Maximum number of searches of one rollout server at the same time. Further calls wait."""
    max_wait_s: float = Field(default=300.0, gt=0)
    """How long a call waits for its turn, in seconds, before it fails."""

    @model_validator(mode="after")
    def _has_one_source(self) -> SearchTool:
        if (self.index is None) == (self.url is None):
            raise ValueError("give either `index` or `url`")
        return self


class McpServer(Config):
    """An MCP server, whose tools are offered to the model: a program that the rollout server starts, or a URL."""

    command: list[str] = []
    """Program and arguments of a server that talks over its standard input and output. Each rollout server starts one.
    Empty: use `url`."""
    url: str | None = Field(default=None, pattern=r"^https?://")
    """Address of a server that talks over HTTP, such as `http://127.0.0.1:8000/mcp`. None: use `command`."""
    transport: Literal["streamable_http", "sse"] = "streamable_http"
    """How a server with a `url` talks: Streamable HTTP, or the older HTTP with server-sent events."""
    env: dict[str, str] = {}
    """Environment variables of the program. It gets PATH, HOME and the like, and nothing else of the environment."""
    pass_env: list[str] = []
    """Names of environment variables of the rollout server that the program gets too, such as a token's."""
    folder: Path | None = None
    """Working directory of the program. None: that of the rollout server."""
    headers: dict[str, str] = {}
    """HTTP headers of requests to `url`."""
    api_key_file: Path | None = None
    """File with the key that is sent to `url` as `Authorization: Bearer …`. None: no key."""
    tools: list[str] | None = None
    """Names of the tools to offer. None: all that the server has."""
    prefix: str = ""
    """Text in front of the names that the model calls, if the tools of two servers have the same names."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of one call in seconds, with the time for a new connection if the old one broke."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """Deadline for connecting and listing the tools at start, in seconds."""
    max_concurrent: int = Field(default=64, ge=1)
    """Maximum number of calls of one rollout server at the same time. Further calls wait."""
    max_wait_s: float = Field(default=300.0, gt=0)
    """How long a call waits for its turn, in seconds, before it fails."""

    @model_validator(mode="after")
    def _has_one_address(self) -> McpServer:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give either `command` or `url`")
        return self


BuiltInTool = Annotated[PythonTool | SearchTool, Field(discriminator="kind")]


# ── Configuration of agent loops, and of how many groups a rollout server works on at once ──


class AgentsConfig(Config):
    """Tools, interactions, custom agents, and the limits of multi-turn samples."""

    default_agent: str = Field(default="single_turn_agent", min_length=1)
    """Agent of prompts without `agent_name`: a built-in one or one of `custom`."""
    tools_file: Path | None = None
    """YAML file of the tools that `tool_agent` offers. Each entry has class_name, config and tool_schema, in verl's
    format. None: no tools."""
    tools: dict[str, BuiltInTool] = {}
    """Built-in tools that `tool_agent` offers, by the name that the model calls: `{code_interpreter: {kind: python}}`.
    They are offered together with those of `tools_file`."""
    mcp_servers: dict[str, McpServer] = {}
    """MCP servers whose tools `tool_agent` offers too, by a name for messages."""
    interactions_file: Path | None = None
    """YAML file of the interactions. Each entry has name, class_name and config, in verl's format. None: no
    interactions."""
    custom: dict[str, str] = {}
    """Agents of your own: maps a name to `package.module:function` or `path/file.py:function`. A prompt selects its
    agent by this name."""
    tool_format: str = "hermes"
    """Format in which the model writes tool calls: `hermes`, `llama3_json`, `openai`, or a parser of your own as
    `package.module:function` or `path/file.py:function`."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum number of assistant turns in one sample. A sample that reaches it ends with finish reason `length`."""
    max_user_turns: int | None = Field(default=None, ge=1)
    """Maximum number of replies to the model in one sample: the results of the calls of one turn, or a reply of the
    interaction. The sample ends with the assistant turn after the last one. None: only `max_turns` limits them."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in one assistant turn. None: whatever the response's `max_tokens` has left."""
    max_calls_per_turn: int = Field(default=8, ge=1)
    """Maximum number of tool calls that are executed in one turn, all at the same time; verl's `max_parallel_calls`.
    The model is told that further calls were not executed."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Deadline, in seconds, of each call into a tool or an interaction. Built-in tools have deadlines of their own."""
    tool_timeouts_s: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Deadlines, in seconds, of single tools, by their names. They replace `tool_timeout_s`."""
    max_tool_response_chars: int = Field(default=4096, ge=1)
    """Maximum length of a tool response in characters; verl's `max_tool_response_length`. A longer one is cut, with a
    note in the text."""
    tool_response_keep: Literal["head", "tail", "both"] = "head"
    """Part that is kept of a tool response that is too long: its start, its end, or both. verl's
    `tool_response_truncate_side` has other words for the same: `left` is `head`, `right` is `tail`, `middle` is
    `both`."""
    scored_text: Literal["response", "last_turn"] = "response"
    """Text that the reward function receives: the whole response including tool output, or only the last assistant
    turn."""
    turn_rewards: Literal["sum", "replace", "last", "record"] = "sum"
    """How the rewards of tools and interactions are combined with the reward function's. `sum` adds all of them.
    `replace` adds the rewards of tools and interactions and ignores the function. `last` takes the final reward only,
    or the last turn's if there is no final one. `record` changes nothing: the rewards are only kept in `reward_parts`,
    as in verl, where the reward function decides with `extra_info.tool_rewards` and `turn_scores`."""


class AdaptiveConcurrencyConfig(Config):
    """Lowers the number of concurrent groups while the engine is overloaded. It never exceeds
    `max_concurrent_groups`."""

    enabled: bool = True
    """False keeps `max_concurrent_groups` groups in progress at all times."""
    max_kv_usage: float = Field(default=0.95, gt=0, le=1)
    """The engine counts as overloaded while requests wait and more than this share of its KV cache is in use."""
    max_queue_s: float = Field(default=5.0, gt=0)
    """The engine also counts as overloaded when more than half as many requests wait as run, for this many seconds
    without a break."""


# ── Configuration of rewards: which kind each data source gets, and the settings of each kind ──


class RewardSettings(Config):
    """Settings that every kind of reward has."""

    timeout_s: float | None = Field(default=None, gt=0)
    """Deadline of one reward in seconds. None: `rollout.reward.timeout_s`."""


class ExactMatchReward(RewardSettings):
    """1 if the response equals the ground truth, ignoring white space at both ends; otherwise 0."""

    kind: Literal["exact_match"] = "exact_match"


class RegexReward(RewardSettings):
    """1 if the last match of a pattern is right, otherwise 0."""

    kind: Literal["regex"]
    pattern: str
    """Regular expression that is searched in the response. If it has a group, the text of group 1 must equal the ground
    truth; otherwise any match is right."""
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
    """`strict` takes the number after the last `####`. `flexible` takes the last number near the end of the
    response."""
    correct_score: float = 1.0
    """Score of a correct answer."""
    format_score: float = 0.1
    """Score of an answer that is well-formed but wrong. A response without an answer gets 0."""


class MathReward(RewardSettings):
    """Compares the answer, usually in `\\boxed{}`, with the ground truth as a mathematical expression, by
    math-verify."""

    kind: Literal["math"] = "math"
    correct_score: float = 1.0
    """Score of a correct answer."""
    wrong_score: float = 0.0
    """Score of a wrong or missing answer. DAPO's recipe uses -1."""


class SearchQaReward(RewardSettings):
    """1 if the text in the response's last `<answer>` tag equals one of the wanted answers, ignoring case, punctuation
    and articles; otherwise 0. The ground truth is an answer, a list, or `{target: ...}`, as in Search-R1."""

    kind: Literal["search_qa"]


class VerlReward(RewardSettings):
    """The number that verl's built-in reward gives."""

    kind: Literal["verl"]
    rule: Literal["gsm8k", "math", "math_dapo", "geometry3k", "search_qa"]
    """Which of verl's rules: `gsm8k` (1 or 0), `math` (1 or 0, by normalised text), `math_dapo` (1 or -1), `geometry3k`
    (0.9 for the answer, 0.1 for the format) or `search_qa` (1 or 0)."""


class CodeReward(RewardSettings):
    """Runs the last fenced Python block of the response against tests, in a sandboxed process."""

    kind: Literal["code"] = "code"
    partial_credit: bool = True
    """Score the share of tests that pass. False: 1 if all pass, otherwise 0."""
    compat: Literal["none", "verl"] = "none"
    """`verl`: only a block that is fenced as "```python" counts, and outputs are compared as verl does: as text, and as
    numbers if every line is one number. Tests that call a function give 1 or 0. With `max_tests: 10` and
    `test_timeout_s: 10`, this is the score of verl's `prime_code`."""
    max_tests: int | None = Field(default=None, ge=1)
    """Maximum number of tests to run, from the first on. None: all."""
    test_timeout_s: float = Field(default=5.0, gt=0)
    """Limit of one test in seconds, of wall-clock and of CPU time. Tests that `timeout_s` leaves no time for fail."""
    memory_bytes: int = Field(default=2**30, ge=2**26)
    """Maximum memory of a test in bytes: of each process (its address space), and of all its processes together."""
    file_bytes: int = Field(default=2**24, ge=0)
    """Largest file, in bytes, that a test may write to its private folder."""
    folder_bytes: int = Field(default=2**26, ge=2**16)
    """Maximum size of all files of a test together, in bytes."""
    output_bytes: int = Field(default=2**22, ge=1)
    """Maximum output of a test in bytes. A test that prints more fails."""
    max_processes: int = Field(default=16, ge=1)
    """Maximum number of processes and threads of one test."""
    confinement: Literal["auto", "bubblewrap", "builtin"] = "auto"
    """What isolates the tests. `bubblewrap` needs the program bwrap and a host that allows user namespaces, or root.
    `builtin` needs Landlock and seccomp. `auto`: bubblewrap, which must be installed; builtin where bubblewrap cannot
    start, as in pods without user namespaces."""
    allow_unisolated: bool = False
    """Run tests even if nothing can isolate them on this machine. Code that a model has
    written can then reach the network, the disk and this user's other processes."""


class FunctionReward(RewardSettings):
    """A Python function of your own."""

    kind: Literal["function"]
    file: Path
    """Python file that defines the function."""
    name: str = "compute_score"
    """Name of the function. It has verl's signature: data_source, solution_str, ground_truth and extra_info, passed by
    name. It may also be a class: each reward process makes one object of it, with `kwargs`, and calls that."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments, like verl's reward_kwargs."""
    batch: bool = False
    """Call it once for all samples of a prompt, as verl's `batch` manager does: data_sources, solution_strs,
    ground_truths and extra_infos are lists, and so is the result."""

    def __hash__(self) -> int:
        return hash((self.file, self.name))


class RemoteReward(RewardSettings):
    """An HTTP service. It receives data_source, solution_str, ground_truth and extra_info as JSON, and returns a number
    or {"score": ...}."""

    kind: Literal["remote"]
    url: str = Field(pattern=r"^https?://")
    """Address that requests are POSTed to."""
    attempt_timeout_s: float = Field(default=10.0, gt=0)
    """Timeout of one attempt in seconds. Connection errors, 429 and 5xx are retried, with growing pauses, until the
    deadline."""
    max_concurrent: int = Field(default=64, ge=1)
    """Maximum number of concurrent requests of one rollout server."""
    api_key_file: Path | None = None
    """File with the key that is sent as `Authorization: Bearer …`. None: no key."""


class RewardModelReward(RewardSettings):
    """No reward from the rollout server: the sample gets 0, and the learner's reward model scores it before it is
    trained on. The scores of a validation under `reward` have the 0 of its samples, those under `combined_reward` the
    model's score."""

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
    """Reward of each data source, given by name or by a pattern such as `aime*`: `{aime*: {kind: math}}`. It takes
    precedence over the fields below."""
    function_file: Path | None = None
    """Python file with your own reward function, for all data sources that `by_data_source` does not name. None: the
    built-in table, then `default`."""
    function_name: str = "compute_score"
    """Name of the function. It has verl's signature: data_source, solution_str, ground_truth and extra_info, passed by
    name."""
    function_kwargs: dict[str, Any] = {}
    """Further keyword arguments, like verl's reward_kwargs."""
    function_batch: bool = False
    """Call the function once for all samples of a prompt, with lists, as verl's `batch` manager does."""
    compat: Literal["none", "verl"] = "none"
    """`verl`: the built-in table gives verl's numbers, with its format scores and DAPO's -1."""
    default: Reward = ExactMatchReward()
    """Reward of data sources that are neither configured here nor in the built-in table. The server logs once for each
    of them."""
    num_processes: int = Field(default=4, ge=1, le=1024)
    """Maximum number of processes that compute rewards for one server. They are started with the server, or when they
    are first needed."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of one reward in seconds, from when a process starts on it. The process is then killed and replaced."""
    error_value: float = Field(default=0.0, ge=-MAX_REWARD, le=MAX_REWARD)
    """Reward of a sample whose reward function failed or timed out. Such samples are counted in
    `penstock_reward_errors_total`."""
    max_failed_share: float | None = Field(default=1.0, gt=0, le=1)
    """Share of failed rewards, over the samples of one step, at which the run pauses with the reason. 1: when every one
    of them failed. None: the run never pauses for that. Below the share, failed samples are trained with `error_value`.
    Once it is reached, groups with a failed sample are not trained: their prompts are sampled again."""


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
