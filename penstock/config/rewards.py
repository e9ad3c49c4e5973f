"""Configuration of rewards: which one a data source gets, and what each kind can be told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from penstock.config.base import Config


class RewardSettings(Config):
    """What every kind of reward has."""

    timeout_s: float | None = Field(default=None, gt=0)
    """Deadline of one reward; None: `rollout.reward.timeout_s`."""


class ExactMatchReward(RewardSettings):
    """1 when the response is the ground truth, white space at its ends aside; else 0."""

    kind: Literal["exact_match"] = "exact_match"


class RegexReward(RewardSettings):
    """1 when the pattern's last match is right, else 0."""

    kind: Literal["regex"]
    pattern: str
    """Searched in the response. With a group, the text of group 1 must be the ground truth; else a match will do."""
    ignore_case: bool = False
    """Of the pattern and of the comparison."""

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
    """strict: the last `#### 42`. flexible: the last number anywhere in the end of the response."""
    correct_score: float = 1.0
    format_score: float = 0.1
    """Score of an answer that is well-formed and wrong. A response without an answer gets 0."""


class MathReward(RewardSettings):
    """The answer, usually in `\\boxed{}`, is compared with the ground truth as mathematics, by math-verify."""

    kind: Literal["math"] = "math"
    correct_score: float = 1.0
    wrong_score: float = 0.0
    """Of a wrong answer, and of none. DAPO's own recipe has -1."""


class CodeReward(RewardSettings):
    """The response's last fenced block of Python is run against tests in a confined process."""

    kind: Literal["code"] = "code"
    partial_credit: bool = True
    """The share of tests that pass. False: 1 when all pass, else 0."""
    max_tests: int | None = Field(default=None, ge=1)
    """Only the first so many tests are run."""
    test_timeout_s: float = Field(default=5.0, gt=0)
    """Wall-clock and CPU limit of one test. The tests that `timeout_s` leaves no time for fail."""
    memory_bytes: int = Field(default=2**30, ge=2**26)
    """Address space of each process of a test."""
    file_bytes: int = Field(default=2**24, ge=0)
    """Largest file that a test may write into its private folder."""
    output_bytes: int = Field(default=2**22, ge=1)
    """A test that prints more than this fails."""
    max_processes: int = Field(default=16, ge=1)
    """Processes and threads of one test."""
    allow_unisolated: bool = False
    """Run tests where the kernel offers neither Landlock nor seccomp: nothing then keeps code that a model has written
    from the network, the disk and this user's other processes."""


class FunctionReward(RewardSettings):
    """A Python function of the user's."""

    kind: Literal["function"]
    file: Path
    """Python file with the function."""
    name: str = "compute_score"
    """Its name; verl's signature: data_source, solution_str, ground_truth and extra_info, given by name."""
    kwargs: dict[str, Any] = {}
    """Further arguments by name: verl's reward_kwargs."""

    def __hash__(self) -> int:
        return hash((self.file, self.name))


class RemoteReward(RewardSettings):
    """POSTs data_source, solution_str, ground_truth and extra_info as JSON, and gets a number or {"score": ...}."""

    kind: Literal["remote"]
    url: str = Field(pattern=r"^https?://")
    attempt_timeout_s: float = Field(default=10.0, gt=0)
    """Of one attempt. It is repeated on connection errors, 429 and 5xx, with growing pauses, until the deadline."""
    max_concurrent: int = Field(default=64, ge=1)
    """Requests under way at once."""
    api_key_file: Path | None = None
    """File with the key that is sent as `Authorization: Bearer …`."""


class RewardModelReward(RewardSettings):
    """0 from the rollout server: the learner's reward model scores the sample before it is trained. Evaluations, which
    the learner never sees, keep the 0."""

    kind: Literal["reward_model"]


Reward = Annotated[
    ExactMatchReward
    | RegexReward
    | Gsm8kReward
    | MathReward
    | CodeReward
    | FunctionReward
    | RemoteReward
    | RewardModelReward,
    Field(discriminator="kind"),
]


class RewardConfig(Config):
    by_data_source: dict[str, Reward] = {}
    """Data source, or a pattern such as `aime*`: its reward, for example {kind: math}. Goes before everything below."""
    function_file: Path | None = None
    """Python file with a custom reward function, for every data source that `by_data_source` does not name."""
    function_name: str = "compute_score"
    """Its name; verl's signature: data_source, solution_str, ground_truth and extra_info, given by name."""
    function_kwargs: dict[str, Any] = {}
    """Further arguments by name: verl's reward_kwargs."""
    default: Reward = ExactMatchReward()
    """Reward of data sources that neither this file nor the built-in table knows; it is logged once for each."""
    num_processes: int = Field(default=4, ge=1)
    """Processes that compute rewards beside a server, each started when it is first needed."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of one reward, from when a process takes it. Past it the process is killed and replaced."""
    error_value: float = Field(default=0.0, allow_inf_nan=False)
    """Reward of a sample whose function failed or ran out of time; counted in reward_errors_total."""
