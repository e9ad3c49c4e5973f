"""`penstock plan --gpus` finds the fastest deployment that fits, and says what the others cost."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli import main as cli
from penstock.config.gpu_bundles import num_gpus as bundled_gpus
from penstock.config.loading import load_config, merged, validate
from penstock.errors import InvalidInput
from penstock_tools.sizing.hardware import GPUS, TRAIN_EFFICIENCY, USABLE_MEMORY, Gpu
from penstock_tools.sizing.memory import (
    OFFLOADS,
    STAGINGS,
    Role,
    Setup,
    peak,
    peak_bytes,
    role_memory,
    server_memory,
    total,
)
from penstock_tools.sizing.models import KNOWN, shape_of_hub_id
from penstock_tools.sizing.plan import ROLES, chosen_fields, deployment_memory, memory_of, task_of
from penstock_tools.sizing.rates import PLACEMENTS, PlanTask, Workload, exchange_s, offload_s, train_s
from penstock_tools.sizing.search import PARALLEL, SHARED_UTILIZATIONS, Deployment, Learner, search, servers_on

WITH_CRITIC = ("policy", "reference", "critic")
SIZES = {
    "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip
"""config.json of the shape `7b`."""


def _task(name: str, gpu: Gpu, workload: Workload, roles: Sequence[str] = ("policy", "reference")) -> PlanTask:
    return PlanTask({role: KNOWN[name] for role in ROLES if role in roles}, gpu, workload)


def _long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@st.composite
def _tasks(draw: st.DrawFn) -> PlanTask:
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
def test_any_proposal_fits_and_more_gpus_are_never_slower(task: PlanTask, num_gpus: int, more: int) -> None:
    _check_proposals(task, num_gpus, more)


def test_a_proposal_fits_and_more_gpus_are_not_slower() -> None:
    _check_proposals(_task("7b", GPUS["h100"], Workload(max_staleness=1), WITH_CRITIC), 4, 2)


def _check_proposals(task: PlanTask, num_gpus: int, more: int) -> None:
    try:
        result = search(task, num_gpus)
    except InvalidInput as error:
        assert "does not fit on" in str(error) and "\n" not in str(error)
        return
    assert search(task, num_gpus + more).best.tokens_per_s >= result.best.tokens_per_s
    for found in (result.best, *result.alternatives.values()):
        learner, server = found.learner, found.server
        assert found.num_gpus <= num_gpus and found.num_servers >= 1
        assert result.cost(found) >= 0 and found.max_staleness <= task.workload.max_staleness
        bytes_of = {role: total(peak(uses).device) for role, uses in deployment_memory(found).items() if uses}
        beside = learner.utilization * task.gpu.memory_bytes
        assert learner.ranks.keys() == bytes_of.keys() - {"rollout"}
        for roles, _ in learner.groups:
            assert sum(bytes_of[role] for role in roles) + beside <= task.gpu.memory_bytes * USABLE_MEMORY
        items = server_memory(task.policy, server.tensor_parallel, task.gpu, found.utilization).device
        assert total(items) <= found.utilization * task.gpu.memory_bytes * 1.000001
        sample = task.policy.kv_bytes_per_token * (task.workload.prompt_tokens + task.workload.response_tokens)
        held = server.concurrent_groups * task.workload.num_samples * sample / server.tensor_parallel
        assert held <= items[-1].num_bytes * 1.000001, "the KV cache holds the groups that a server works on"


def _brute(task: PlanTask, num_gpus: int) -> Iterator[tuple[float, str]]:
    """The step time of every deployment, without any rule that leaves one out."""
    workload = task.workload
    for learner in _all_learners(task, num_gpus):
        for size in PARALLEL:
            most = (num_gpus - learner.num_gpus) // size if not learner.utilization else int(size == 1)
            servers = servers_on(task, size, learner.utilization or workload.gpu_memory_utilization)
            for server, num_servers, staleness in itertools.product(
                servers, range(1, most + 1), range(workload.max_staleness + 1)
            ):
                found = Deployment(task, learner, server, num_servers, staleness)
                yield found.pace.step_s, f"{found}"


def _all_learners(task: PlanTask, num_gpus: int) -> Iterator[Learner]:
    workload, policy = task.workload, task.policy
    base, longest = workload.setup, workload.longest_sequence
    ranks = range(1, num_gpus + 1)
    for placement, share in itertools.product(PLACEMENTS, (None, 0.0, *SHARED_UTILIZATIONS)):
        groups = task.groups(placement)
        if share is not None:
            if placement == "standalone" and len(groups) > 1:
                continue
            groups = [tuple(role for group in groups for role in group)]
        for counts, parallel, offload in itertools.product(
            itertools.product(ranks, repeat=len(groups)), (1, 2, 4), OFFLOADS
        ):
            if counts[0] % parallel or policy.num_heads % parallel or sum(counts) > num_gpus:
                continue
            if share is not None and (counts != (1,) or parallel > 1):
                continue
            micros = {base.micro_batch_tokens // divisor for divisor in (1, 2, 4)}
            micros.add(min(base.micro_batch_tokens, -(-longest // parallel)))
            for micro, staging in itertools.product(micros, STAGINGS):
                setup = replace(
                    base, offload=offload, staging=staging, micro_batch_tokens=micro,
                    longest_sequence=longest, sequence_parallel=parallel,
                )  # fmt: skip
                room = task.gpu.memory_bytes * (USABLE_MEMORY - (share or 0.0))
                split = tuple(zip(groups, counts, strict=True))
                able = [role for group, count in split for role in group if role != "policy" and count % parallel == 0
                        and task.shapes[role].num_heads % parallel == 0]  # fmt: skip
                if parallel > 1 and longest > micro:
                    setup = replace(setup, sharing=frozenset((role, parallel) for role in able))
                if all(sum(_bytes(task, role, count, setup) for role in group) <= room for group, count in split):
                    yield Learner(placement, split, setup, train_s(task, split, setup), share or 0.0)


def _bytes(task: PlanTask, role: Role, count: int, setup: Setup) -> float:
    uses = role_memory(role, task.shapes[role], count, setup)
    found = total(peak(uses).device) if uses else 0.0
    assert found == peak_bytes(role, task.shapes[role], count, setup)
    return found


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
    for deployment in found.best, *list(found.alternatives.values())[::3]:
        base: dict[str, Any] = {
            "model": {"path": str(tmp_path), "dtype": "bfloat16"},
            "dataset": {"num_samples": workload.num_samples},
            "rollout": {"engine": {"max_model_len": workload.longest_sequence}},
            "learner": {"algorithm": {"kl": {"placement": "loss" if "reference" in roles else "none"}}},
        }
        if "critic" in roles:
            base["learner"]["algorithm"]["advantage"] = {"name": "gae"}
        if workload.setup.lora_rank:
            base["learner"]["lora"] = {"rank": workload.setup.lora_rank, "alpha": 64}
        config = validate(merged(base, chosen_fields(deployment)), "plan")
        on_bundles = bundled_gpus(config.learner.placement, config.learner.needed_roles)
        is_shared = deployment.learner.utilization > 0
        for_servers = 0 if is_shared else deployment.num_servers * deployment.server.tensor_parallel
        assert on_bundles + for_servers == deployment.num_gpus
        planned = {role: uses for role, uses in deployment_memory(deployment).items() if uses and role != "rollout"}
        groups = memory_of(config, GPUS["h200"])
        assert {role: uses for group in groups for role, uses in group.uses.items()} == planned
        assert all(group.fits for group in groups)
        again = task_of(config, GPUS["h200"], {"response_tokens": workload.response_tokens})
        assert again.workload.setup.lora_rank == workload.setup.lora_rank
        assert again.shapes.keys() == task.shapes.keys()


# ── the command ──


def test_the_search_shows_what_alternatives_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--gpus", "8", "--model", "7b", "--gpu", "h100"]) == 0
    text = capsys.readouterr().out
    for part in ("best ", "standalone ", "max_staleness 0", "offload", "the learner is busy", "servers are busy",
                 "does not fit:", "KV cache", "config\n"):  # fmt: skip
        assert part in text, part
    costs = [float(cost) for cost in re.findall(r" ([\d.]+)% +(?:the learner is|servers are|groups take)", text)]
    assert len(costs) > 5 and costs == sorted(costs) and costs[0] >= 0
    assert cli.main(["plan", "--gpus", "8", "--placement", "standalone"]) == 0
    assert "split-collocate" not in capsys.readouterr().out


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
            "70b does not fit on 1 h100: standalone, policy on 1 GPU: 1149.3 of 73.6 GB; raise --gpus",
        ),
        (["--write", "x.yaml"], "--write writes what --gpus found: add --gpus N"),
        (["--gpus", "2", "--write", "/nowhere/x.yaml"], "--write /nowhere/x.yaml cannot be written"),
    ],
)
def test_what_cannot_be_planned_is_reported_in_one_line(
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
        return Setup.of(validate(data, "test")).tokens_of(role)

    assert tokens("policy") == tokens("reference") == 32768
    shared = {"policy": {"num_ranks": 4}, "sequence_parallel": 4, "micro_batch_tokens": 4096}
    assert tokens("policy", **shared) == 8192 and tokens("reference", **shared) == 32768
    shared["reference"] = {"num_ranks": 2, "sequence_parallel": 2}
    assert tokens("policy", **shared) == 8192 and tokens("reference", **shared) == 16384


def test_copies_of_key_heads_need_memory() -> None:
    model = KNOWN["1.5b"]
    assert (model.num_heads, model.num_kv_heads) == (12, 2)
    sizes = [model.shared_attention_size(size) for size in (1, 2, 4, 6, 12)]
    assert sizes == [2 * (12 + heads) * 128 for heads in (2, 2, 4, 6, 12)]
    setup = Setup(micro_batch_tokens=2**17, logprob_chunk_tokens=16)
    few, many = (peak_bytes("policy", model, 4, replace(setup, sequence_parallel=size)) for size in (2, 4))
    assert many - few == 2**17 * 2 * 2 * 128 * setup.compute_bytes, "two more keys and values of each token"


def test_roles_of_long_sequences_share_them_where_the_policy_does() -> None:
    """A critic whose sequences are too long for one GPU fits where its ranks share them."""
    gpu = replace(GPUS["h100"], memory_bytes=64e9)
    run = {
        "model": {"path": "Qwen/Qwen2.5-1.5B"},
        "dataset": {"max_tokens": 129_000},
        "rollout": {"engine": {"max_model_len": 131_072}},
        "learner": {
            "algorithm": {"advantage": {"name": "gae"}, "kl": {"placement": "none"}},
            "critic": {},
            "micro_batch_tokens": 4096,
        },
    }
    task = task_of(validate(run, "test"), gpu, {})
    found = search(task, 16).best
    setup = found.learner.setup
    assert setup.sequence_parallel > 1 and setup.num_sharing("critic") == setup.sequence_parallel
    ranks = found.learner.ranks["critic"]
    assert ranks % setup.num_sharing("critic") == 0
    assert task.needed_bytes(["critic"], ranks, replace(setup, sharing=frozenset())) > task.usable_bytes
    chosen = validate(merged(run, chosen_fields(found)), "test")
    assert chosen.learner.sequence_parallel_of("critic") == setup.sequence_parallel
    again = task_of(chosen, gpu, {})
    whole = replace(found, task=again, learner=replace(found.learner, setup=replace(setup, sharing=frozenset())))
    assert chosen_fields(whole)["learner"]["critic"]["sequence_parallel"] == 1


def test_the_memory_of_roles_in_one_pool_adds_up() -> None:
    """Policy and critic train at once, on the same GPUs: a search and `--config` count both."""
    gpu, half = GPUS["h200"], {"num_ranks": 4, "gpus_per_rank": 0.5}
    learner = {"algorithm": {"advantage": {"name": "gae"}}, "placement": "standalone", "policy": half}
    for pool, groups in (("policy", [("policy", "critic")]), ("", [("policy",), ("critic",)])):
        run = {"model": {"path": "Qwen/Qwen2.5-7B"}, "learner": learner | {"critic": half | {"pool": pool}}}
        config = validate(run, "test")
        task = task_of(config, gpu, {})
        assert [task.groups(placement) for placement in PLACEMENTS] == [groups, groups]
        assert [tuple(group.roles) for group in memory_of(config, gpu)] == groups
        setup, needed = Setup.of(config), sum(group.num_bytes for group in memory_of(config, gpu))
        assert needed == pytest.approx(sum(_bytes(task, role, 4, setup) for role in ("policy", "critic")))
        found = search(task, 8).best
        assert [roles for roles, _ in found.learner.groups] == groups
        chosen = validate(merged(run, chosen_fields(found)), "test")
        assert [tuple(group.roles) for group in memory_of(chosen, gpu)] == groups


@pytest.mark.parametrize(
    ("changed", "has_pass"),
    [({}, False), ({"minibatches_per_step": 2}, True), ({"algorithm": {"kl": {"placement": "reward"}}}, True)],
)
def test_the_policys_own_forward_pass_is_counted_where_a_step_makes_one(
    changed: dict[str, Any], has_pass: bool
) -> None:
    config = validate({"model": {"path": "Qwen/Qwen2.5-7B"}, "learner": changed}, "test")
    task = task_of(config, GPUS["h200"], {})
    assert task.workload.recomputes_log_probs == has_pass
    model, setup = KNOWN["7b"], Setup(offload="all")
    once = replace(task, workload=replace(task.workload, recomputes_log_probs=False))
    forward = 2 * model.num_parameters
    assert task.work(("policy",), setup)[0] == (forward if has_pass else 0)
    split = ((("policy",), 8),)
    computed = forward / 8 * task.workload.tokens_per_step / (GPUS["h200"].flops * TRAIN_EFFICIENCY)
    assert train_s(task, split, Setup()) - train_s(once, split, Setup()) == pytest.approx(computed if has_pass else 0)
    for role, is_longer in (("policy", has_pass), ("critic", False)):
        copied = [offload_s(role, model, 8, each.workload, setup) for each in (task, once)]
        assert (copied[0] > copied[1]) == is_longer
    seconds = [exchange_s(each, 8, Setup(sequence_parallel=2)) for each in (task, once)]
    assert seconds[0] == pytest.approx(seconds[1] * (4 / 3 if has_pass else 1))
    assert exchange_s(task, 8, Setup()) == 0
