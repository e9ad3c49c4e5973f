"""`penstock plan --gpus` finds the fastest deployment that fits, and says what the others cost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli import main as cli
from penstock.config.gpu_bundles import num_gpus as bundled_gpus
from penstock.config.loading import load_config, validate
from penstock.errors import InvalidInput
from penstock_tools.sizing.hardware import GPUS, USABLE_MEMORY, Gpu
from penstock_tools.sizing.memory import Role, Setup, peak, role_moments, tokens_of_a_rank, total
from penstock_tools.sizing.models import KNOWN, shape_of_hub_id
from penstock_tools.sizing.plan import ROLES, Plan, memory_of, server_plan, task_of
from penstock_tools.sizing.rates import (
    GROUP_VARIATION,
    LONGEST_GROUP,
    RoleWork,
    Workload,
    exchange_s,
    offload_s,
    pace,
    train_s,
)
from penstock_tools.sizing.search import (
    PLACEMENTS,
    SHARED_UTILIZATIONS,
    LearnerChoice,
    Placement,
    Task,
    pace_of,
    search,
    server_choices,
)
from penstock_tools.sizing.simulation import FleetModel, simulate

WITH_CRITIC = ("policy", "reference", "critic")
SIZES = {
    "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip
"""config.json of the shape `7b`."""


def _task(name: str, gpu: Gpu, workload: Workload, roles: Sequence[str] = ("policy", "reference")) -> Task:
    return Task({role: KNOWN[name] for role in ROLES if role in roles}, gpu, workload)


def _long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@st.composite
def _tasks(draw: st.DrawFn) -> Task:
    setup = Setup(
        lora_rank=draw(st.sampled_from([0, 0, 16])), master_bytes=draw(st.sampled_from([4, 2])),
        micro_batch_tokens=draw(st.sampled_from([4096, 16384])),
    )  # fmt: skip
    workload = Workload(
        groups_per_step=draw(st.sampled_from([16, 64])), num_samples=draw(st.sampled_from([1, 8])),
        response_tokens=draw(st.sampled_from([256, 1024, 8192])), max_staleness=draw(st.integers(0, 3)), setup=setup,
    )  # fmt: skip
    gpu = GPUS[draw(st.sampled_from(["l40s", "h100", "h200"]))]
    roles = ["policy", *(role for role in ROLES[1:] if draw(st.booleans()))]
    return _task(draw(st.sampled_from(["0.5b", "3b", "7b", "32b"])), gpu, workload, roles)


# ── properties ──


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(task=_tasks(), num_gpus=st.integers(1, 16), more=st.integers(1, 8))
def test_any_proposal_fits_and_more_gpus_are_never_slower(task: Task, num_gpus: int, more: int) -> None:
    _check_proposals(task, num_gpus, more)


def test_a_proposal_fits_and_more_gpus_are_not_slower() -> None:
    _check_proposals(_task("7b", GPUS["h100"], Workload(max_staleness=1), WITH_CRITIC), 4, 2)


def _check_proposals(task: Task, num_gpus: int, more: int) -> None:
    try:
        result = search(task, num_gpus)
    except InvalidInput as error:
        assert "does not fit on" in str(error) and "\n" not in str(error)
        return
    assert search(task, num_gpus + more).best.tokens_per_s >= result.best.tokens_per_s
    for proposal in (result.best, *result.alternatives.values()):
        learner, server = proposal.learner, proposal.server
        assert proposal.num_gpus <= num_gpus and proposal.num_servers >= 1
        assert result.cost(proposal) >= 0 and proposal.max_staleness <= task.workload.max_staleness
        bytes_of = {role: plan.num_bytes for role, plan in Plan(task, proposal).roles.items()}
        groups = [list(task.shapes)] if learner.is_packed else task.groups(learner.placement)
        beside = learner.utilization * task.gpu.memory_bytes
        for group in groups:
            assert sum(bytes_of[role] for role in group) + beside <= task.gpu.memory_bytes * USABLE_MEMORY
        share = learner.utilization or task.workload.gpu_memory_utilization
        terms = server_plan(task.policy, task.gpu, server.tensor_parallel, share).terms
        assert total(terms) <= share * task.gpu.memory_bytes * 1.000001
        sample = task.policy.kv_bytes_per_token * (task.workload.prompt_tokens + task.workload.response_tokens)
        held = server.concurrent_groups * task.workload.num_samples * sample / server.tensor_parallel
        assert held <= terms[-1].num_bytes * 1.000001, "the KV cache holds the groups that a server works on"


def _brute(task: Task, num_gpus: int) -> Iterator[tuple[float, str]]:
    """The step time of every deployment, without any rule that leaves one out."""
    workload = task.workload
    for learner in _all_learners(task, num_gpus):
        share = learner.utilization or workload.gpu_memory_utilization
        for server in server_choices(task, share, []):
            size = server.tensor_parallel
            most = (num_gpus - learner.num_gpus) // size if not learner.utilization else int(size == 1)
            for num_servers, staleness in itertools.product(range(1, most + 1), range(workload.max_staleness + 1)):
                found = pace_of(task, learner, server, num_servers, staleness)
                yield found.step_s, f"{learner} {server} {num_servers} {staleness}"


def _all_learners(task: Task, num_gpus: int) -> Iterator[LearnerChoice]:
    workload, policy = task.workload, task.policy
    base, longest = workload.setup, workload.longest_sequence
    ranks = range(1, num_gpus + 1)
    for placement, share in itertools.product(PLACEMENTS, (None, 0.0, *SHARED_UTILIZATIONS)):
        groups = task.groups(placement)
        if share is not None:
            if placement == "standalone" and len(groups) > 1:
                continue
            groups = [[role for group in groups for role in group]]
        for counts, parallel, offloads in itertools.product(
            itertools.product(ranks, repeat=len(groups)), (1, 2, 4), (False, True)
        ):
            if counts[0] % parallel or policy.num_heads % parallel or sum(counts) > num_gpus:
                continue
            if share is not None and (counts != (1,) or parallel > 1):
                continue
            micros = {base.micro_batch_tokens // divisor for divisor in (1, 2, 4)}
            micros.add(min(base.micro_batch_tokens, -(-longest // parallel)))
            for micro, staging in itertools.product(micros, ("device", "host")):
                setup = replace(base, cpu_offload=offloads, staging=staging)  # type: ignore[arg-type]
                room = task.gpu.memory_bytes * (USABLE_MEMORY - (share or 0.0))
                if all(
                    sum(_bytes(task, role, count, setup, micro, parallel) for role in group) <= room
                    for group, count in zip(groups, counts, strict=True)
                ):
                    yield _learner(task, placement, groups, counts, setup, micro, parallel, share)


def _bytes(task: Task, role: Role, count: int, setup: Setup, micro: int, parallel: int) -> float:
    tokens = tokens_of_a_rank(micro, task.workload.longest_sequence, parallel, role)
    moments = role_moments(role, task.shapes[role], count, replace(setup, micro_batch_tokens=tokens))
    return total(peak(moments).device) if moments else 0.0


def _learner(
    task: Task, placement: Placement, groups: list[list[Role]], counts: tuple[int, ...], setup: Setup, micro: int,
    parallel: int, share: float | None,
) -> LearnerChoice:  # fmt: skip
    size = {role: shape.active_parameters for role, shape in task.shapes.items()}
    work = [[RoleWork(role, count, size[role]) for role in group] for group, count in zip(groups, counts, strict=True)]
    if "reference" in task.shapes and task.reference_is_policy:
        work[0].append(RoleWork("reference", counts[0], size["policy"]))
    tokens = tokens_of_a_rank(micro, task.workload.longest_sequence, parallel, "policy")
    setup = replace(setup, micro_batch_tokens=tokens)
    offload = max(
        offload_s(role.role, task.shapes[role.role], role.num_ranks, task.workload, setup)  # type: ignore[index]
        for group in work
        for role in group
        if role.is_trained
    )
    seconds = train_s(task.gpu, work, task.workload, setup) + offload
    seconds += exchange_s(task.policy, task.gpu, counts[0], parallel, task.workload)
    ranks = tuple((role, count) for group, count in zip(groups, counts, strict=True) for role in group)
    return LearnerChoice(
        placement, ranks, setup, micro, parallel, sum(counts), seconds, share is not None, share or 0.0
    )


@pytest.mark.parametrize(
    ("memory", "num_gpus", "workload", "roles"),
    [
        (48e9, 3, Workload(max_staleness=0), WITH_CRITIC[:1]),
        _long(80e9, 4, Workload(), WITH_CRITIC[:2]),
        _long(40e9, 4, Workload(num_samples=1, groups_per_step=128), WITH_CRITIC),
        _long(
            80e9, 3, Workload(setup=Setup(lora_rank=16, micro_batch_tokens=4096), response_tokens=4096), WITH_CRITIC[:2]
        ),
        _long(24e9, 4, Workload(response_tokens=8192, groups_per_step=16), WITH_CRITIC[:2]),
    ],
)
def test_no_deployment_is_faster_than_the_one_that_was_found(
    memory: float, num_gpus: int, workload: Workload, roles: Sequence[str]
) -> None:
    task = _task("1.5b", replace(GPUS["h100"], memory_bytes=memory), workload, roles)
    fastest_s, what = min(_brute(task, num_gpus))
    assert search(task, num_gpus).best.pace.step_s == pytest.approx(fastest_s, rel=1e-12), what


def test_the_pace_is_near_the_simulation() -> None:
    for groups, staleness, slots, train, push in itertools.product(
        (16, 64), (0, 1, 3), (16, 64, 256), (1, 10), (0.2, 3)
    ):
        fleet = FleetModel(
            num_servers=4, concurrent_groups=slots // 4, group_s=10, groups_per_step=groups, max_staleness=staleness,
            train_s=train, push_s=push, gather_s=push / 2, pause_s=0.1, group_variation=GROUP_VARIATION,
            longest_group=LONGEST_GROUP, num_steps=25,
        )  # fmt: skip
        found = pace((train, push / 2, push, 0.1), 10, slots, staleness, groups)
        assert found.step_s == pytest.approx(simulate(fleet).step_s, rel=0.25), (fleet, found)


# ── agreement with a configuration ──


@pytest.mark.parametrize(
    ("num_gpus", "workload", "roles"),
    [
        (4, Workload(response_tokens=16384), WITH_CRITIC[:1]),
        _long(8, Workload(), WITH_CRITIC[:2]),
        _long(8, Workload(setup=Setup(lora_rank=32), response_tokens=8192), WITH_CRITIC[:2]),
        _long(12, Workload(num_samples=4), WITH_CRITIC),
    ],
)
def test_plan_config_finds_the_memory_that_the_search_found(
    num_gpus: int, workload: Workload, roles: Sequence[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    task = _task("7b", GPUS["h200"], workload, roles)
    found = search(task, num_gpus)
    for proposal in found.best, *list(found.alternatives.values())[::3]:
        plan = Plan(task, proposal)
        base: dict[str, Any] = {
            "model": {"path": str(tmp_path), "dtype": "bfloat16"},
            "dataset": {"num_samples": workload.num_samples},
            "rollout": {"engine": {"max_model_len": workload.longest_sequence}},
            "learner": {"algorithm": {"kl": {"placement": "loss" if "reference" in roles else "none"}}},
        }
        if "critic" in roles:
            base["learner"]["algorithm"]["advantage"] = {"name": "gae"}
        config = validate(plan.config(base), "plan")
        on_bundles = bundled_gpus(config.learner.placement, config.learner.needed_roles)
        for_servers = 0 if proposal.learner.utilization else proposal.num_servers * proposal.server.tensor_parallel
        assert on_bundles + for_servers == proposal.num_gpus
        planned = {role.role: role.num_bytes for role in plan.roles.values() if role.moments}
        groups = memory_of(config, GPUS["h200"])
        assert {role.role: role.num_bytes for group in groups for role in group.plans} == pytest.approx(planned)
        assert all(group.fits for group in groups)
        again = task_of(config, GPUS["h200"], Workload(), {"response_tokens": workload.response_tokens})
        assert again.workload.setup.lora_rank == workload.setup.lora_rank
        assert again.shapes.keys() == task.shapes.keys()


# ── the command ──


def test_the_search_shows_what_alternatives_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--gpus", "8", "--model", "7b", "--gpu", "h100"]) == 0
    text = capsys.readouterr().out
    for part in ("best ", "standalone ", "max_staleness 0", "cpu_offload", "the learner is busy", "servers are busy",
                 "does not fit:", "KV cache", "config "):  # fmt: skip
        assert part in text, part
    assert cli.main(["plan", "--gpus", "8", "--json", "--placement", "standalone"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["placement"] == "standalone" and found["best"]["cost"] == 0
    costs = [other["cost"] for other in found["alternatives"]]
    assert costs == sorted(costs) and costs[0] >= 0


def test_the_chosen_deployment_is_written_and_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    words = ["--gpus", "2", "--model", "0.5b", "--lora-rank", "8", "--write", str(file)]
    assert cli.main(["plan", *words]) == 0
    config = load_config(file)
    assert str(config.model.path) == "Qwen/Qwen2.5-0.5B-Instruct" and config.learner.lora is not None
    assert cli.main(["plan", "--config", str(file)]) == 0
    assert "fits" in capsys.readouterr().out
    again = tmp_path / "again.yaml"
    assert cli.main(["plan", "--config", str(file), "--gpus", "4", "--write", str(again)]) == 0
    assert load_config(again).learner.lora == config.learner.lora
    assert load_config(again).dataset == config.dataset


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ["--gpus", "1", "--model", "70b"],
            "70b does not fit on 1 h100: it takes 1298 of 74 GB to have policy and reference on 1 GPU; raise",
        ),
        (["--write", "x.yaml"], "--write writes what --gpus found: add --gpus N"),
        (["--gpus", "2", "--write", "/nowhere/x.yaml"], "--write /nowhere/x.yaml cannot be written"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_models_of_the_hub_have_known_shapes() -> None:
    assert shape_of_hub_id("Qwen/Qwen2.5-Coder-7B-Instruct@main") is KNOWN["7b"]
    assert shape_of_hub_id("Qwen/Qwen2.5-Math-1.5B") is KNOWN["1.5b"]
    assert shape_of_hub_id("Qwen/Qwen3-30B-A3B") is KNOWN["30b-a3b"]
    assert shape_of_hub_id("Qwen/Qwen2.5-72B") is None


def test_a_sequence_longer_than_a_micro_batch_needs_memory_that_ulysses_shares() -> None:
    def tokens(role: str, **learner: Any) -> int:
        data = {
            "model": {"path": "/models/policy"},
            "rollout": {"engine": {"max_model_len": 32768}},
            "learner": learner,
        }
        return Setup.of(validate(data, "test"), role).micro_batch_tokens

    assert tokens("policy") == tokens("reference") == 32768
    shared = {"policy": {"num_ranks": 4}, "sequence_parallel": 4, "micro_batch_tokens": 4096}
    assert tokens("policy", **shared) == 8192 and tokens("reference", **shared) == 32768


@pytest.mark.parametrize(
    ("changed", "has_pass"),
    [({}, False), ({"minibatches_per_step": 2}, True), ({"algorithm": {"kl": {"placement": "reward"}}}, True)],
)
def test_the_policys_own_forward_pass_is_counted_where_a_step_makes_one(
    changed: dict[str, Any], has_pass: bool
) -> None:
    config = validate({"model": {"path": "Qwen/Qwen2.5-7B"}, "learner": changed}, "test")
    workload = task_of(config, GPUS["h200"], Workload(), {}).workload
    assert workload.recomputes_log_probs == has_pass
    model, setup = KNOWN["7b"], Setup(cpu_offload=True)
    work = [[RoleWork("policy", 8, 10**9), RoleWork("reference", 8, 10**9)]]
    once = replace(workload, recomputes_log_probs=False)
    forward = train_s(GPUS["h200"], [[RoleWork("reference", 8, 10**9)]], workload, Setup())
    assert train_s(GPUS["h200"], work, workload, setup) - train_s(GPUS["h200"], work, once, setup) == pytest.approx(
        forward if has_pass else 0
    )
    for role, is_longer in (("policy", has_pass), ("critic", False)):
        longer = offload_s(role, model, 8, workload, setup) > offload_s(role, model, 8, once, setup)
        assert longer == is_longer
    seconds = [exchange_s(model, GPUS["h200"], 8, 2, each) for each in (workload, once)]
    assert seconds[0] == pytest.approx(seconds[1] * (4 / 3 if has_pass else 1))
