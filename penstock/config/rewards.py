"""Configuration of rewards: which kind each data source gets, and the settings of each kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from penstock.config.base import Config
from penstock.reward_bounds import MAX_REWARD


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
