"""`penstock plan` computes known figures, and `penstock simulate` keeps its invariants."""

from __future__ import annotations

import json
import runpy
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli import main as cli
from penstock.cli.plan import as_json
from penstock.config.loading import validate
from penstock.errors import InvalidInput
from penstock.sizing.fleet_model import FleetModel
from penstock.sizing.hardware import GPUS, LOAD_RATE, TRAIN_EFFICIENCY, USABLE_MEMORY
from penstock.sizing.models import KNOWN, find_shape
from penstock.sizing.plan import PLACEMENTS, Workload, decode_step_s, make_plan
from penstock.sizing.simulation import simulate

ROOT = Path(__file__).parents[2]
PUBLISHED = {"0.5b": 0.494, "1.5b": 1.544, "3b": 3.086, "7b": 7.616, "14b": 14.77, "32b": 32.76, "70b": 70.55}
"""Parameters by the models' cards, in 1e9."""
FLEET = FleetModel(
    num_servers=4, concurrent_groups=8, group_s=10, groups_per_step=32, max_staleness=2, train_s=12, gather_s=0.5,
    push_s=1, pause_s=0.1,
)  # fmt: skip


# ── plan ──


def test_shapes_have_the_parameters_of_their_models() -> None:
    for name, billions in PUBLISHED.items():
        assert KNOWN[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.003)


def test_a_folder_s_shape_has_the_parameters_of_its_file() -> None:
    folder = ROOT / "examples" / "arithmetic" / "model"
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    tensors = [entry["shape"] for name, entry in header.items() if name != "__metadata__" and len(entry["shape"]) == 2]
    assert find_shape(str(folder)).num_parameters == sum(rows * columns for rows, columns in tensors)


@pytest.mark.parametrize("name", KNOWN)
def test_every_model_has_a_plan_whose_roles_fit_and_whose_config_loads(name: str) -> None:
    gpu = GPUS["h100"]
    for placement in PLACEMENTS:
        plan = make_plan(KNOWN[name], gpu, placement, Workload())
        together = [plan.policy.num_bytes, plan.reference.num_bytes]
        fullest = sum(together) if placement == "split-collocate" else max(together)
        assert fullest <= gpu.memory_bytes * USABLE_MEMORY
        assert plan.server.num_bytes <= gpu.memory_bytes
        assert (plan.reference.num_gpus == 0) == (placement == "split-collocate")
        assert 0 < plan.forecast.staleness_mean <= Workload().max_staleness
        config = validate({"model": {"path": "/models/policy"}} | as_json(plan)["config"], "plan")
        assert config.learner.policy.num_ranks == plan.policy.num_gpus


def test_critic_and_reward_model_share_a_group_of_their_own() -> None:
    gpu, workload = GPUS["h100"], Workload(has_critic=True, has_reward_model=True)
    without = {placement: make_plan(KNOWN["7b"], gpu, placement, Workload()) for placement in PLACEMENTS}
    alone, shared = (make_plan(KNOWN["7b"], gpu, placement, workload) for placement in PLACEMENTS)
    for plan in (alone, shared):
        before = without[plan.placement]
        assert (plan.policy, plan.reference) == (before.policy, before.reference)
        critic, reward_model = plan.others
        assert (critic.role, reward_model.role) == ("critic", "reward_model")
        assert plan.train_s >= before.train_s
        config = validate({"model": {"path": "/models/policy"}} | as_json(plan)["config"], "plan")
        assert config.learner.critic is not None and config.learner.reward_model is not None
    assert all(role.num_gpus for role in alone.others)
    assert [bool(role.num_gpus) for role in shared.others] == [True, False]
    assert sum(role.num_bytes for role in shared.others) <= gpu.memory_bytes * USABLE_MEMORY


def test_fewer_ranks_than_planned_would_not_fit() -> None:
    from penstock.sizing.memory import Batch, policy_terms, total

    for name in ("7b", "70b"):
        plan = make_plan(KNOWN[name], GPUS["h100"], "standalone", Workload())
        smallest = Batch(micro_batch_tokens=4096)
        half = policy_terms(KNOWN[name], plan.policy.num_gpus // 2, smallest, stages_on_gpu=False)
        assert total(half) > GPUS["h100"].memory_bytes * USABLE_MEMORY


def test_rates_are_near_what_was_measured_on_an_h200() -> None:
    measurements = json.loads((ROOT / "bench" / "results" / "weights_gpu.json").read_text())["measurements"]
    measured = {entry["name"]: entry["median"] for entry in measurements}
    for name in ("0.5b", "7b"):
        gap_s = decode_step_s(KNOWN[name], GPUS["h200"], 1, measured[f"vllm-{name}: requests in flight"], 512)
        assert gap_s == pytest.approx(measured[f"vllm-{name}: usual gap between tokens"] / 1000, rel=0.3)
    trained = json.loads((ROOT / "bench" / "results" / "learner.json").read_text())["measurements"]
    for name, setting, operations in (
        ("0.5b", "float32 masters, compiled, 0% recomputed, 16384 tokens, 100% kept", 6),
        ("1.5b", "float32 masters, compiled, 25% recomputed, 8192 tokens, 70% kept", 6.5),
        ("7b", "float32 masters, compiled, 50% recomputed, 8192 tokens, 70% kept", 7.0),
    ):
        [rate] = [m["median"] for m in trained if m["name"] == f"{name}: ours, {setting}, equal lengths"]
        estimate = TRAIN_EFFICIENCY * GPUS["h200"].flops / (operations * KNOWN[name].num_parameters)
        assert estimate == pytest.approx(rate, rel=0.5), "half as much again, because kernels are small"
    pause_s = 2 * KNOWN["7b"].num_parameters / LOAD_RATE
    assert pause_s == pytest.approx(measured["vllm-7b: pause"] / 1000, rel=0.3)


def test_a_model_that_fits_nowhere_says_so() -> None:
    with pytest.raises(InvalidInput, match="70b does not fit on 128 tiny; take larger GPUs"):
        make_plan(KNOWN["70b"], replace(GPUS["l40s"], name="tiny", memory_bytes=12e9), "standalone", Workload())


# ── simulation ──


def test_a_learner_that_is_slower_than_its_servers_never_waits() -> None:
    forecast = simulate(replace(FLEET, train_s=60))
    assert forecast.idle_share < 0.01
    assert forecast.step_s == pytest.approx(60.5, rel=0.05)
    assert forecast.staleness_mean == pytest.approx(FLEET.max_staleness, abs=0.1), (
        "groups that are ready wait their turn"
    )


def test_servers_that_are_slower_than_the_learner_set_the_pace() -> None:
    forecast = simulate(replace(FLEET, train_s=1, num_steps=200))
    assert forecast.groups_per_s == pytest.approx(FLEET.num_slots / FLEET.group_s, rel=0.1)
    assert forecast.idle_share == pytest.approx(1 - 1.5 / forecast.step_s, abs=0.02)
    assert forecast.busy_share > 0.95


def test_without_staleness_training_is_synchronous() -> None:
    forecast = simulate(replace(FLEET, max_staleness=0))
    assert (forecast.staleness_max, forecast.mixed_version_ratio) == (0, 0)
    assert forecast.staleness_mean == pytest.approx(0, abs=1e-9)
    assert forecast.idle_share > 0.4, "it waits for every group of its own step"


def test_a_pause_and_failures_cost_what_they_cost() -> None:
    busy = replace(FLEET, train_s=1, num_steps=100)
    undisturbed, paused = simulate(busy), simulate(replace(busy, pause_s=3.0))
    assert paused.step_s - undisturbed.step_s == pytest.approx(2.9, abs=0.5)
    failing = simulate(replace(busy, server_mtbf_s=200, restart_s=50))
    assert failing.num_lost > 0
    assert failing.step_s > 1.2 * undisturbed.step_s


def test_stragglers_hold_up_only_those_who_wait_for_them() -> None:
    uneven = replace(FLEET, group_variation=1.5, longest_group=10.0, num_servers=16)
    waiting, correcting, dropping = (
        simulate(replace(uneven, stale_policy=policy)) for policy in ("wait", "correct", "drop")
    )
    assert waiting.idle_share > correcting.idle_share
    assert waiting.num_expired == correcting.num_expired == 0 < dropping.num_expired
    assert correcting.staleness_max > uneven.max_staleness


@settings(max_examples=25)
@given(
    num_servers=st.integers(1, 6), concurrent_groups=st.integers(1, 5), groups_per_step=st.integers(1, 12),
    max_staleness=st.integers(0, 3), train_s=st.floats(0.1, 20), push_s=st.floats(0, 20), pause_s=st.floats(0, 1),
    stale_policy=st.sampled_from(["wait", "drop"]), seed=st.integers(0, 100),
)  # fmt: skip
def test_no_group_is_older_than_its_policy_allows(**fields: Any) -> None:
    model = FleetModel(group_s=5, num_steps=15, server_mtbf_s=300, restart_s=20, **fields)
    forecast = simulate(model)
    assert len(forecast.steps) == 15
    assert max(step.staleness_max for step in forecast.steps) <= model.max_staleness
    assert 0 <= forecast.idle_share <= 1 and 0 <= forecast.busy_share <= 1
    assert simulate(model) == forecast, "the same seed, the same run"


def test_ten_thousand_servers() -> None:
    fleet = replace(FLEET, num_servers=10_000, concurrent_groups=2, groups_per_step=10_000, num_steps=6)
    forecast = simulate(replace(fleet, server_mtbf_s=86_400))
    assert forecast.num_lost > 0
    assert forecast.staleness_mean > 0


# ── commands ──


def test_the_sizing_guide_is_the_one_of_the_plans() -> None:
    built = runpy.run_path(str(ROOT / "docs" / "make_sizing.py"))["build"]()
    assert (ROOT / "docs" / "sizing.md").read_text() == built, "run: python docs/make_sizing.py"


def test_plan_shows_its_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", "7b", "--gpu", "h200"]) == 0
    text = capsys.readouterr().out
    for part in ("standalone", "split-collocate", "7.62e9 x 8 B / ", "KV cache", "tokens/s", "staleness", "push"):
        assert part in text
    assert cli.main(["plan", "--model", "0.5b", "--placement", "standalone", "--json"]) == 0
    [plan] = json.loads(capsys.readouterr().out)
    assert plan["roles"]["policy"]["num_bytes"] == sum(t["num_bytes"] for t in plan["roles"]["policy"]["terms"])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["plan", "--gpu", "h900"], "--gpu h900 is not known; choose one of"),
        (["plan", "--model", "/nowhere"], "--model /nowhere is neither one of"),
        (["simulate", "--num-servers", "3"], "missing: --concurrent-groups, --group-s, --groups-per-step"),
        (["simulate", "--run-dir", "/nowhere"], "/nowhere/config.yaml does not exist"),
    ],
)
def test_what_is_missing_is_named(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_simulate_compares_with_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("model: {path: /models/policy}\nreplay: {groups_per_step: 8}\n")
    row = {"wait_s": 0.5, "forward_s": 0.2, "update_s": 0.7, "gather_s": 0.1, "step_s": 1.5, "staleness_mean": 1.0,
           "staleness_max": 2.0, "mixed_version_ratio": 0.1}  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(9)))
    name = "penstock_rollout_episode_duration_seconds"
    (tmp_path / "metrics.txt").write_text(f"{name}_count 10.0\n{name}_sum 25.0\n")
    words = ["--run-dir", str(tmp_path), "--rollout-metrics", str(tmp_path / "metrics.txt"), "--json"]
    assert cli.main(["simulate", *words, "--concurrent-groups", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"]["group_s"] == 2.5 and result["model"]["train_s"] == pytest.approx(0.9)
    assert result["measured"]["idle_share"] == pytest.approx(1 / 3)
    assert result["forecast"]["step_s"] == pytest.approx(8 * 2.5 / 4, rel=0.1), "four at once, eight per step"
