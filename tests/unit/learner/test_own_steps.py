"""Steps and roles of the user's own, over real workers in this process: the examples, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.gpu_bundles import active_resource_groups
from penstock.config.loading import load_config
from penstock.errors import ConfigError, ProcessDied, RoleDied
from penstock_learner import dataflow
from penstock_learner.roles.dispatch import dispatched
from penstock_learner.roles.role_group import trained_roles
from penstock_learner.start_check import check_step
from penstock_learner.steps.program import TrainingStep, load_program
from penstock_learner.term import Term
from support.groups import make_group
from support.learner_ranks import make_step
from support.scripted_engines import make_tokenizer_folder
from support.tiny_models import make_tiny_qwen2

pytestmark = pytest.mark.usefixtures("one_rank")
ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/own_steps"
GROUPS = [make_group(number) for number in (1, 2, 3)]
HEAD = """
import asyncio
from penstock_learner.dataflow import *
"""


def write(folder: Path, body: str) -> str:
    """A file with a step. Returns how the config names it."""
    path = folder / "own.py"
    path.write_text(HEAD + body)
    return f"{path}:step"


@pytest.mark.parametrize("placement", ["standalone", "split-collocate"])
@pytest.mark.parametrize("name", ["distillation", "two_critics", "judge"])
def test_the_examples_are_placed_and_pass_the_check(name: str, placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options = ["--learner.placement", placement]
    if name == "distillation" and placement == "split-collocate":
        options += ["--learner.roles.teacher.pool", "policy"]
    learner = load_config(EXAMPLES / f"{name}.yaml", options).learner
    check_step(learner)
    (own,) = learner.roles
    (group,) = [group for group in active_resource_groups(placement, learner.needed_roles) if own in group]
    shared = {"distillation": {"policy"}, "two_critics": {"critic"}, "judge": set()}[name]
    assert group.keys() - {own} == (shared if placement == "split-collocate" else set())
    trained = {"two_critics": ["policy", "critic", "second_critic"]}.get(name, ["policy"])
    assert trained_roles(learner) == trained


async def test_distillation_moves_the_policy_to_its_teacher(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    file = f"{EXAMPLES}/distillation.py"
    step = make_step(
        tiny_models, step=f"{file}:step", ahead=f"{file}:ahead", lr=1e-2,
        roles={"teacher": {"worker": "reference", "path": str(make_tiny_qwen2(tmp_path / "teacher", seed=11))}},
    )  # fmt: skip
    results = [await step.run(GROUPS, number, Term()) for number in (1, 2, 3, 4)]
    gaps = [result.by_name()["teacher_kl"] for result in results]
    assert gaps[-1] < gaps[0] - 0.01
    teacher = await step.ahead(GROUPS)
    assert teacher["teacher_log_probs"].shape == teacher.behaviour_log_probs.shape
    assert results[-1].recomputed is not None


async def test_a_second_critic_is_trained_alongside_the_first(tiny_models: dict[str, Path]) -> None:
    step = make_step(
        tiny_models, step=f"{EXAMPLES}/two_critics.py:step", critic={"lr": 1e-2},
        roles={"second_critic": {"worker": "critic", "lr": 1e-2}}, algorithm={"advantage": {"name": "gae"}},
    )  # fmt: skip
    metrics = [(await step.run(GROUPS, number, Term())).by_name() for number in (1, 2)]
    assert metrics[0]["critic_gap"] == 0, "both heads start with zeros"
    assert metrics[1]["critic_gap"] > 0, "they learn from other samples"
    assert metrics[1]["second_critic_loss"] > 0 and metrics[1]["critic_loss"] != metrics[1]["second_critic_loss"]
    assert metrics[1]["grad_norm"] > 0 and "value_explained_variance" in metrics[1]


async def test_a_judge_of_its_own_adds_to_the_rewards(tmp_path: Path) -> None:
    folder = make_tiny_qwen2(tmp_path / "judge", seed=5)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(make_tokenizer_folder(tmp_path / "tokenizer") / name, folder / name)
    judge = {"worker": "reward_model", "path": str(folder), "judge": {"question": "good", "yes": "y", "no": "n"}}
    step = make_step({"policy": folder}, ahead=f"{EXAMPLES}/judge.py:ahead", roles={"judge": judge})
    batch = await step.ahead(GROUPS)
    plain = np.array([trajectory.reward for group in GROUPS for trajectory in group.trajectories])
    np.testing.assert_allclose(batch.rewards, plain + 0.5 * batch["judge_scores"], atol=1e-6)
    assert ((batch["judge_scores"] > 0) & (batch["judge_scores"] < 1)).all()
    metrics = (await step.run(GROUPS, 1, Term())).by_name()
    assert metrics["reward_mean"] == pytest.approx(batch.rewards.mean(), abs=1e-5)


async def test_an_own_worker_is_called_as_it_declares(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Its file also has the step. The methods return which tokens and sequences they were given."""
    file = tmp_path / "lengths.py"
    file.write_text("""
import numpy as np
from penstock_learner.dataflow import dispatched, update_policy, with_advantages
from penstock_learner.roles.rank import Rank

class Lengths(Rank):
    def load(self): ...
    @dispatched(join="tokens")
    def positions(self, part):
        lengths = [n for micro in part.micro_batches for n in micro.response_lengths]
        return np.concatenate([np.arange(n, dtype=np.float32) for n in lengths])
    @dispatched(join="sequences")
    def lengths(self, part):
        return np.concatenate([micro.response_lengths for micro in part.micro_batches])
    @dispatched(split="copies", join="ranks")
    def factor(self, number):
        return self.settings.settings["factor"] * number

async def step(batch, roles, context):
    batch = await context.ahead()
    batch = batch.with_token_fields(positions=await roles.lengths.positions(batch))
    batch = batch.with_sequence_fields(seen=await roles.lengths.lengths(batch))
    batch = with_advantages(batch, context.algorithm, context.kl_coefficient)
    await update_policy(roles.policy, context.minibatches(batch), context)
    starts = np.cumsum(batch.response_lengths) - batch.response_lengths
    right = (batch["seen"] == batch.response_lengths).all() and (batch["positions"][starts] == 0).all()
    return batch, {"right": right, "factor": (await roles.lengths.factor(3))[0]}
""")
    step = make_step(
        tiny_models, step=f"{file}:step", micro_batch_tokens=40,
        roles={"lengths": {"worker": f"{file}:Lengths", "settings": {"factor": 7}}},
        algorithm={"correction": {"mode": "bypass"}},
    )  # fmt: skip
    assert trained_roles(step.config) == ["policy"]
    metrics = (await step.run(GROUPS, 1, Term())).by_name()
    assert (metrics["right"], metrics["factor"]) == (1.0, 21.0)


@pytest.mark.parametrize(
    ("join", "returned"), [("sequences", "np.zeros(99)"), ("tokens", "np.zeros(1)"), ("sequences", "3.0")]
)
async def test_an_own_worker_that_returns_another_number_of_entries_ends_with_one_line(
    join: str, returned: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """A longer array would be cut, and a single number spread, without a word."""
    file = tmp_path / "wrong.py"
    file.write_text(f"""
import numpy as np
from penstock_learner.dataflow import dispatched
from penstock_learner.roles.rank import Rank

class Wrong(Rank):
    def load(self): ...
    @dispatched(join="{join}")
    def numbers(self, part):
        return {returned}

async def step(batch, roles, context):
    batch = await context.ahead()
    await roles.wrong.numbers(batch)
    return batch, {{}}
""")
    step = make_step(tiny_models, step=f"{file}:step", roles={"wrong": {"worker": f"{file}:Wrong"}})
    with pytest.raises(ConfigError, match=rf"wrong\.numbers returned an array of shape .* for the \d+ {join}"):
        await step.run(GROUPS, 1, Term())


ADVANTAGES = "batch = with_advantages(batch, context.algorithm, 0.0)\n    "
LATER_UPDATE = "policy.update was called more than once in a step, with a batch without old_log_probs; compute them"
STEPS_THAT_FAIL = {
    "x = batch['nothing']\n    return batch, {}": r"own.py:step failed: ValueError: the batch has no field 'nothing'",
    "await update_policy(roles.policy, [batch], context)": "the batch has no field 'advantages'",
    "return batch": r"must return \(batch, metrics\), not a SequenceBatch",
    "return batch.select([0]), {}": r"returned 1 of \d+ sequences; return all of them",
    "return batch.select(range(batch.num_sequences)[::-1]), {}": "returned the sequences in another order",
    "await roles.policy.update(batch.select([]))": "policy.update was called with a batch without sequences",
    "return batch, {'text': 'a'}": "must return its metrics as a dict of numbers",
    "roles.teacher": "the run has no role 'teacher'; its roles are: policy",
    "assert len(await roles.policy.log_probs(batch.select([]))) == 0\n    raise KeyError('later')": "KeyError: 'later'",
    "await roles.policy.gather_weights(batch)": "has no method 'gather_weights' for steps; its methods are: log_probs",
    f"{ADVANTAGES}for _ in range(2):\n        await update_policy(roles.policy, [batch], context)": LATER_UPDATE,
    f"{ADVANTAGES}await gather_all(*(update_policy(roles.policy, [batch], context) for _ in range(2)))": LATER_UPDATE,
    f"{ADVANTAGES}await update_policy(roles.policy, batch.split(2), context)": "the batch has no field 'old_log_probs'",
    "asyncio.ensure_future(roles.policy.log_probs(batch))\n    await asyncio.sleep(0)\n    return batch, {}": (
        "returned while policy.log_probs was running; await every call"
    ),
}


@pytest.mark.parametrize(("body", "message"), STEPS_THAT_FAIL.items())
async def test_a_step_that_is_wrong_ends_with_one_line(
    body: str, message: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    own = write(tmp_path, f"async def step(batch, roles, context):\n    batch = await context.ahead()\n    {body}\n")
    gates: Any = {"forward": asyncio_barrier(2)} if "ensure_future" in body else {}
    with pytest.raises(ConfigError, match=message):
        await make_step(tiny_models, gates, step=own).run(GROUPS, 1, Term())


async def test_a_second_policy_is_refused_a_later_update_without_log_probs_too(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Its later update would take the log-probs of the weights that the first one has changed."""
    own = write(
        tmp_path,
        f"""
from penstock_learner.roles.policy import PolicyWorker

class Second(PolicyWorker):
    role = "second"

async def step(batch, roles, context):
    batch = await context.ahead()
    {ADVANTAGES}for _ in range(2):
        await update_policy(roles.second, [batch], context)
    return batch, {{}}
""",
    )
    step = make_step(tiny_models, step=own, roles={"second": {"worker": own.replace(":step", ":Second")}})
    with pytest.raises(ConfigError, match=r"second\.update was called more than once in a step.*by second\.log_probs"):
        await step.run(GROUPS, 1, Term())


def asyncio_barrier(parties: int) -> Any:
    import asyncio

    return asyncio.Barrier(parties)


async def test_a_step_that_does_not_read_what_was_computed_ahead_is_refused(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    own = write(tmp_path, "async def step(batch, roles, context):\n    return batch, {}\n")
    with pytest.raises(ConfigError, match=r"must await context.ahead\(\)"):
        await make_step(tiny_models, step=own).run(GROUPS, 1, Term())


async def test_a_trained_role_cannot_be_called_ahead(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    own = write(tmp_path, "async def step(batch, roles, context):\n    await roles.policy.log_probs(batch)\n")
    with pytest.raises(ConfigError, match="the policy role is trained, so it cannot be called a step ahead"):
        await make_step(tiny_models, ahead=own).ahead(GROUPS)


class DyingRole:
    """A role whose ranks die in their first call. `start` revives them."""

    num_ranks = 1

    def __init__(self, inner: Any) -> None:
        self.inner, self.name, self.declarations = inner, inner.name, inner.declarations
        self.deaths = 0

    async def call_each(self, method: str, arguments: Any) -> list[Any]:
        if not self.deaths:
            self.deaths = 1
            raise RoleDied(self.name, f"a rank of the {self.name} role died in {method}")
        results: list[Any] = await self.inner.call_each(method, arguments)
        return results

    async def start(self) -> None: ...


def with_dying_role(step: TrainingStep, name: str) -> DyingRole:
    dying = DyingRole(step.roles[name])
    step.roles = {**step.roles, name: dying}  # type: ignore[dict-item]
    step.access.recovery.max_restarts = 1
    return dying


@pytest.mark.parametrize(
    "caught",
    ["except Exception:\n        pass", "except Exception as error:\n        raise RuntimeError('hidden') from error"],
    ids=["swallowed", "renamed"],
)
async def test_the_death_of_a_trained_role_cannot_be_caught_by_a_step(
    caught: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    body = "    batch = await context.ahead()\n    try:\n        await roles.policy.log_probs(batch)\n"
    own = write(tmp_path, f"async def step(batch, roles, context):\n{body}    {caught}\n    return batch, {{}}\n")
    step = make_step(tiny_models, step=own)
    with_dying_role(step, "policy")
    with pytest.raises(RoleDied, match="a rank of the policy role died in log_probs"):
        await step.run(GROUPS, 1, Term())


async def test_a_frozen_role_that_dies_is_restarted_within_the_call(tiny_models: dict[str, Path]) -> None:
    step = make_step(tiny_models, algorithm={"kl": {"placement": "loss"}})
    expected = await step.ahead(GROUPS)
    dying = with_dying_role(step, "reference")
    np.testing.assert_array_equal((await step.ahead(GROUPS))["reference_log_probs"], expected["reference_log_probs"])
    dying.deaths = 0
    with pytest.raises(ProcessDied, match="restarted 1 times in a row"):
        await step.ahead(GROUPS)


FILES_THAT_FAIL = {
    "def step(batch, roles, context): ...": "is not a coroutine function; write `async def`",
    "async def step(batch, roles): ...": r"too many positional arguments\); its parameters are \(batch, roles",
    "step = 3": "is a int, not a function",
    "1 / 0": "fails on import: ZeroDivisionError",
}


@pytest.mark.parametrize(("body", "message"), FILES_THAT_FAIL.items())
def test_the_check_names_what_is_wrong_with_a_file(
    body: str, message: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    path.write_text(body)
    learner = load_config(ROOT / "examples/presets/grpo.yaml", ["--learner.step", f"{path}:step"]).learner
    with pytest.raises(ConfigError, match=message):
        load_program(learner)
    learner = learner.model_copy(update={"step": f"{tmp_path}/none.py:step"})
    with pytest.raises(ConfigError, match="learner.step: there is no file"):
        load_program(learner)


def test_the_check_names_what_is_wrong_with_a_worker(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from penstock_learner.roles.rank import Rank\nclass Plain: ...\nclass Silent(Rank): ...\n"
        "async def step(batch, roles, context): ...\n"
    )
    for name, message in {"Plain": "is not a worker; derive the class", "Silent": "has no method for steps"}.items():
        overrides = ["--learner.step", f"{tmp_path}/own.py:step"]
        overrides += ["--learner.roles", f"{{mine: {{worker: '{tmp_path}/own.py:{name}'}}}}"]
        with pytest.raises(ConfigError, match=message):
            check_step(load_config(ROOT / "examples/presets/grpo.yaml", overrides).learner)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ("{critic: {worker: critic}}", "the name is taken by learner.critic"),
        ("{Mine: {worker: critic}}", "must be text of the form"),
        ("{mine: {worker: unknown}}", "unknown worker 'unknown': give critic, reference, reward_model"),
        ("{mine: {worker: reward_model}}", "worker reward_model needs path"),
    ],
)
def test_roles_that_cannot_be_are_refused(roles: str, message: str) -> None:
    overrides = ["--learner.step", "a.py:step", "--learner.roles", roles]
    with pytest.raises(ConfigError, match=message):
        load_config(ROOT / "examples/presets/grpo.yaml", overrides)
    if "taken" in message:
        with pytest.raises(ConfigError, match="needs your own step"):
            load_config(ROOT / "examples/presets/grpo.yaml", ["--learner.roles", "{mine: {worker: critic}}"])


def test_a_split_has_its_joins_and_the_public_names_exist() -> None:
    with pytest.raises(ValueError, match="split 'copies' cannot be joined by 'tokens'; choose ranks"):
        dispatched(split="copies", join="tokens")
    assert all(hasattr(dataflow, name) for name in dataflow.__all__)
