"""`penstock plan` computes known figures, and `penstock simulate` predicts the steady state of a run."""

from __future__ import annotations

import itertools
import json
import math
import re
import runpy
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import main as cli
from penstock.config.gpu_bundles import num_gpus
from penstock.config.loading import merged, validate
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, InvalidInput
from penstock.machine import HostMemory
from penstock_tools.sizing import plan
from penstock_tools.sizing.hardware import GPUS, LOAD_RATE, TRAIN_EFFICIENCY, USABLE_MEMORY, Gpu
from penstock_tools.sizing.memory import CONTEXT, OFFLOADS, PHASES, STAGED, Role, Setup, peak, role_memory, total
from penstock_tools.sizing.models import KNOWN, find_shape
from penstock_tools.sizing.plan import ROLES, chosen_fields, deployment_memory, memory_of, new_run
from penstock_tools.sizing.rates import (
    GROUP_VARIATION,
    LONGEST_GROUP,
    PLACEMENTS,
    Placement,
    PlanTask,
    Workload,
    decode_step_s,
    pace,
)
from penstock_tools.sizing.search import Deployment, cheapest
from penstock_tools.sizing.simulate_command import forecast

ROOT = Path(__file__).parents[2]
PUBLISHED = {
    "0.5b": 0.494, "1.5b": 1.544, "3b": 3.086, "7b": 7.616, "14b": 14.77, "30b-a3b": 30.53, "32b": 32.76, "70b": 70.55,
}  # fmt: skip
"""Parameters by the models' cards, in 1e9."""
FLEET = {
    "num_servers": 4, "concurrent_groups": 8, "group_s": 10, "groups_per_step": 32, "max_staleness": 2, "train_s": 12,
    "gather_s": 0.5, "push_s": 1, "pause_s": 0.1,
}  # fmt: skip


# ── plan ──


DEFAULT = Workload()


def _plan(name: str, gpu: Gpu, placement: Placement, workload: Workload = DEFAULT, num_roles: int = 2) -> Deployment:
    """The plan of the first so many roles."""
    return cheapest(PlanTask(dict.fromkeys(ROLES[:num_roles], KNOWN[name]), gpu, workload, (placement,)))


def _config(plan: Deployment, **learner: Any) -> RunConfig:
    given = merged(new_run(plan.task.policy.name, {}), {"learner": learner})
    return validate(merged(given, chosen_fields(plan)), "plan")


def _bytes_of(plan: Deployment) -> dict[str, float]:
    return {role: total(peak(uses).device) for role, uses in deployment_memory(plan).items() if uses}


def test_shapes_have_the_parameters_of_their_models() -> None:
    for name, billions in PUBLISHED.items():
        assert KNOWN[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.003)


def test_a_mixture_of_experts_uses_a_part_of_its_parameters() -> None:
    shape = KNOWN["30b-a3b"]
    assert shape.active_parameters / 1e9 == pytest.approx(3.3, rel=0.03)
    assert shape.weights.largest_layer > 128 * 3 * 2048 * 768, "its largest layer holds all experts"
    assert shape.active_parameters < shape.read_parameters(4) < shape.read_parameters(64) < shape.num_parameters
    assert KNOWN["7b"].active_parameters == KNOWN["7b"].read_parameters(4) == KNOWN["7b"].num_parameters


def _header_shapes(folder: Path) -> list[list[int]]:
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]


def test_a_folder_s_shape_has_the_parameters_of_its_file() -> None:
    folder = ROOT / "examples" / "arithmetic" / "model"
    shape = find_shape(str(folder))
    assert shape.num_parameters == sum(math.prod(sizes) for sizes in _header_shapes(folder))
    assert shape.num_parameters == shape.weights.root + shape.num_layers * shape.weights.largest_layer
    computed = replace(shape, counted=None)
    for name in ("total", "largest_layer", "root"):
        counted = getattr(shape.weights, name)
        assert getattr(computed.weights, name) == pytest.approx(counted, rel=0.1), "norms are left out"


_MOE = {
    "num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 50,
    "tie_word_embeddings": False, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("experts", "sizes"),
    [
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10}, (4, 2, 10, 0, 0)),
        ({"num_local_experts": 4, "num_experts_per_tok": 1}, (4, 1, 24, 0, 0)),
        (
            {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_shared_experts": 2,
             "first_k_dense_replace": 1},
            (8, 2, 6, 12, 1),
        ),
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10,
             "shared_expert_intermediate_size": 7, "mlp_only_layers": [0, 1]},
            (4, 2, 10, 7, 2),
        ),
    ],
)  # fmt: skip
def test_the_experts_of_every_family_are_read(tmp_path: Path, experts: dict[str, Any], sizes: tuple[int, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_MOE | experts))
    found = find_shape(str(tmp_path))
    assert found.experts is not None and tuple(vars(found.experts).values()) == sizes
    assert found.active_parameters < found.num_parameters


def test_weights_are_counted_in_the_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_MOE | {"num_experts": 4, "num_experts_per_tok": 2}))
    shapes = {
        "model.embed_tokens.weight": [50, 16], "lm_head.weight": [50, 16], "model.norm.weight": [16],
        "model.layers.0.self_attn.q_proj.weight": [16, 16], "model.layers.1.self_attn.q_proj.weight": [16, 16],
        "model.layers.1.mlp.experts.0.up_proj.weight": [24, 16],
        "model.layers.1.mlp.experts.3.up_proj.weight": [24, 16],
    }  # fmt: skip
    header = json.dumps({name: {"shape": shape} for name, shape in shapes.items()}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    counted = find_shape(str(tmp_path)).counted
    assert counted is not None
    assert vars(counted) == {"largest_layer": 256 + 768, "root": 1616, "total": 1616 + 512 + 768, "experts": 768}
    unused = json.dumps({"mtp.layers.0.up_proj.weight": {"shape": [24, 16]}} | json.loads(header)).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(unused)) + unused)
    (tmp_path / "consolidated.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.replace(b"model.", b""))
    assert find_shape(str(tmp_path)).counted == counted, "only what transformers loads"
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="does not describe a decoder"):
        find_shape(str(tmp_path))


@pytest.mark.parametrize("name", KNOWN)
def test_every_model_has_a_plan_whose_roles_fit_and_whose_config_loads(name: str) -> None:
    gpu = GPUS["h100"]
    for placement in PLACEMENTS:
        plan = _plan(name, gpu, placement)
        num_bytes = _bytes_of(plan)
        together = [num_bytes["policy"], num_bytes["reference"]]
        fullest = sum(together) if placement == "split-collocate" else max(together)
        assert fullest <= gpu.memory_bytes * USABLE_MEMORY
        assert num_bytes["rollout"] <= gpu.memory_bytes
        assert (len(plan.learner.groups) == 1) == (placement == "split-collocate")
        assert 0 < plan.pace.staleness <= Workload().max_staleness
        config = _config(plan)
        assert config.learner.policy.num_ranks == plan.learner.policy_ranks
        assert all(group.fits for group in memory_of(config, gpu))


def test_critic_and_reward_model_share_a_group_of_their_own() -> None:
    gpu = GPUS["h100"]
    extra = {"algorithm": {"advantage": {"name": "gae"}}, "reward_model": {"path": "/models/reward-model"}}
    for placement in PLACEMENTS:
        plan = _plan("7b", gpu, placement, num_roles=4)
        config = _config(plan, **extra)
        assert config.learner.critic is not None and config.learner.reward_model is not None
        groups = [roles for roles, _ in plan.learner.groups]
        assert groups == ([(role,) for role in ROLES] if placement == "standalone" else [ROLES[:2], ROLES[2:]])
        num_bytes = _bytes_of(plan)
        for roles in groups:
            assert sum(num_bytes[role] for role in roles) <= gpu.memory_bytes * USABLE_MEMORY


def test_no_plan_trains_on_more_tokens_for_each_gpu_second() -> None:
    plan = _plan("7b", GPUS["h100"], "split-collocate")
    for change in ({"num_servers": plan.num_servers - 1}, {"num_servers": plan.num_servers + 1}, {"max_staleness": 0}):
        other = replace(plan, **change)
        assert other.tokens_per_s / other.num_gpus < plan.tokens_per_s / plan.num_gpus


def test_fewer_ranks_than_planned_would_not_fit() -> None:
    for name in ("7b", "70b"):
        num_gpus = _plan(name, GPUS["h100"], "standalone").learner.policy_ranks
        half = role_memory("policy", KNOWN[name], num_gpus // 2, Setup(micro_batch_tokens=4096, staging="host"))
        assert total(peak(half).device) > GPUS["h100"].memory_bytes * USABLE_MEMORY


def _bytes(role: Role, phase: Any, model: str, num_ranks: int, **setup: Any) -> float:
    """Device memory of a phase, in GB, without the CUDA context."""
    items = peak(role_memory(role, KNOWN[model], num_ranks, Setup(**setup)), phase).device
    return total([item for item in items if item.name != CONTEXT]) / 1e9


def test_every_role_has_the_phases_that_it_goes_through() -> None:
    for role, phases in (("policy", PHASES), ("critic", PHASES[:2]), ("reference", PHASES[:2])):
        found = {use.phase for use in role_memory(role, KNOWN["7b"], 2, Setup())}  # type: ignore[arg-type]
        assert found == set(phases)


def test_a_rank_loads_its_part_of_the_weights_and_no_more() -> None:
    shard = 4 * KNOWN["32b"].num_parameters / 8 / 1e9
    root = 2 * KNOWN["32b"].weights.root / 1e9
    assert _bytes("policy", "load", "32b", 8) == pytest.approx(shard + root * (2 + 1 / 8))
    assert _bytes("reference", "load", "32b", 8) == pytest.approx(shard / 2 + root * (2 + 1 / 8))


def test_a_gather_holds_one_unit_at_a_time() -> None:
    state = 16 * KNOWN["70b"].num_parameters / 64 / 1e9
    layer, embedding = (2 * n / 1e9 for n in (KNOWN["70b"].weights.largest_layer, KNOWN["70b"].embedding_parameters))
    gathered = _bytes("policy", "gather", "70b", 64, staging="host")
    assert gathered == pytest.approx(state + max(layer * (2 + 1 / 64), embedding * (1 + 1 / 64)))
    assert gathered < 2 * KNOWN["70b"].num_parameters / 1e9, "never the whole model"
    assert _bytes("policy", "push", "70b", 64, staging="host") == pytest.approx(gathered)
    mixture, layer = KNOWN["30b-a3b"], 2 * KNOWN["30b-a3b"].weights.largest_layer / 1e9
    gathered = _bytes("policy", "gather", "30b-a3b", 16, staging="host")
    assert gathered == pytest.approx(mixture.num_parameters / 1e9 + layer * (3 + 1 / 16)), (
        "experts are split for engines"
    )


def test_ranks_that_share_experts_gather_fewer_of_them_and_copies_divide_less() -> None:
    def sizes(role: Role, name: str, **setup: Any) -> float:
        uses = role_memory(role, KNOWN["30b-a3b"], 16, Setup(**setup))
        layer = next(use for use in uses if use.what == "backward pass of a layer")
        return next(item.num_bytes for item in layer.device if item.name == name)

    experts = KNOWN["30b-a3b"].experts_of_layer
    assert experts == pytest.approx(3 * 2048 * 128 * 768)
    saved = sizes("policy", "gathered layer") - sizes("policy", "gathered layer", expert_parallel=8)
    assert saved == pytest.approx(2 * experts * 7 / 8)
    assert sizes("critic", "gathered layer", expert_parallel=8) == sizes("critic", "gathered layer")
    assert sizes("policy", "Adam", expert_parallel=8) == sizes("policy", "Adam")
    assert sizes("policy", "Adam", shard_size=4) == pytest.approx(4 * sizes("policy", "Adam"))
    gathered = [_bytes("policy", "gather", "30b-a3b", 16, staging="host", expert_parallel=n) for n in (1, 8)]
    assert gathered[1] - gathered[0] == pytest.approx(2 * experts / 1e9 * (1 - (2 + 1 / 16) * 7 / 8))


def test_what_is_staged_for_pushes_is_on_the_device_or_on_the_host() -> None:
    def staged(where: str, **setup: Any) -> tuple[float, float]:
        uses = role_memory("policy", KNOWN["7b"], 4, Setup(staging=where, **setup))  # type: ignore[arg-type]
        push = peak(uses, "push")
        return tuple(  # type: ignore[return-value]
            sum(item.num_bytes for item in items if item.name == STAGED) / 1e9 for items in (push.device, push.host)
        )

    assert staged("device") == pytest.approx((4 * 7.615, 0), rel=0.01)
    assert staged("host") == pytest.approx((0, 4 * 7.615), rel=0.01)
    assert 0 < staged("device", lora_rank=16)[0] < 0.5


def test_an_adapter_has_little_state_and_no_second_model() -> None:
    whole, adapter = _bytes("policy", "push", "7b", 2), _bytes("policy", "push", "7b", 2, lora_rank=16)
    assert adapter < 0.35 * whole
    assert role_memory("reference", KNOWN["7b"], 2, Setup(lora_rank=16)) == []
    plan = _plan("7b", GPUS["h200"], "standalone", Workload(setup=Setup(lora_rank=16)))
    assert plan.learner.ranks.keys() == {"policy"} and deployment_memory(plan)["reference"] == []
    config = _config(plan, lora={"rank": 16, "alpha": 32})
    assert config.learner.policy_is_reference and list(config.learner.needed_roles) == ["policy"]


def test_with_an_adapter_the_critic_trains_all_its_weights_and_another_reference_needs_memory() -> None:
    assert _bytes("critic", "step", "7b", 2, lora_rank=16) == _bytes("critic", "step", "7b", 2)
    assert _bytes("critic", "step", "7b", 2, critic_lora_rank=16) < 0.6 * _bytes("critic", "step", "7b", 2)
    own = Setup(lora_rank=16, policy_is_reference=False)
    assert role_memory("reference", KNOWN["7b"], 2, own) == role_memory("reference", KNOWN["7b"], 2, Setup())
    assert _plan("7b", GPUS["h200"], "standalone", Workload(setup=own)).learner.ranks["reference"] > 0


def test_offload_moves_the_state_to_the_host() -> None:
    uses = role_memory("policy", KNOWN["7b"], 2, Setup(offload="all", staging="host"))
    state = 16 * KNOWN["7b"].num_parameters / 2
    assert max(total(use.host) for use in uses) > state
    assert _bytes("policy", "step", "7b", 2, offload="all", staging="host") < 0.4 * state / 1e9
    hosts = [
        max(total(use.host) for use in role_memory("policy", KNOWN["7b"], 2, Setup(offload=each, staging="host")))
        for each in OFFLOADS
    ]
    assert [host - hosts[0] for host in hosts] == pytest.approx([0, state / 2, state / 2, state])
    saved = [_bytes("policy", "gather", "7b", 2, staging="host", offload=each) for each in OFFLOADS]
    assert [saved[0] - each for each in saved] == pytest.approx([0, state / 2e9, state / 2e9, state / 1e9])


@pytest.mark.parametrize("role", ["reference", "reward_model"])
def test_a_frozen_role_is_offloaded_apart(role: Role) -> None:
    model, setup = KNOWN["7b"], Setup(on_host=frozenset({role}))
    here, away = role_memory(role, model, 2, Setup()), role_memory(role, model, 2, setup)
    for before, after in zip(here, away, strict=True):
        moved = next(item.num_bytes for item in before.device if item.name == "weights")
        assert total(before.device) - total(after.device) == pytest.approx(moved)
        assert total(after.host) - total(before.host) == pytest.approx(moved)
    whole, rest = (total(peak(role_memory(role, model, 1, each)).device) for each in (Setup(), setup))
    assert rest < 0.7 * whole
    assert role_memory("policy", model, 2, setup) == role_memory("policy", model, 2, Setup())


def test_the_padded_path_holds_all_logits_of_a_micro_batch() -> None:
    packed, padded = (_bytes("policy", "step", "7b", 4, is_padded=is_padded) for is_padded in (False, True))
    assert padded - packed > 3.5 * 2 * 16384 * 152064 / 1e9
    assert _bytes("critic", "step", "7b", 4, is_padded=True) == _bytes("critic", "step", "7b", 4), "it has no logits"


def test_the_plan_s_gpus_are_those_of_its_bundles() -> None:
    for placement in PLACEMENTS:
        plan = _plan("7b", GPUS["h100"], placement, num_roles=3)
        learner = _config(plan, algorithm={"advantage": {"name": "gae"}}).learner
        counted = num_gpus(learner.placement, learner.needed_roles)
        assert plan.num_gpus == counted + plan.num_servers * plan.server.tensor_parallel


def test_planned_steps_need_the_memory_that_was_measured_on_an_h200() -> None:
    """One rank, with and without float32 masters, compiled, three shares of recomputation."""
    measurements = json.loads((ROOT / "bench" / "results" / "learner.json").read_text())["measurements"]
    pattern = re.compile(
        r"(\S+): ours, (\w+) masters, compiled, (\d+)% recomputed, (\d+) tokens, (\d+)% kept, peak memory"
    )
    batch_tokens = {"0.5b": 8 * 4096, "1.5b": 4 * 4096, "7b": 2 * 4096}
    found = [(match, entry["median"]) for entry in measurements if (match := pattern.fullmatch(entry["name"]))]
    assert len(found) == 6
    for match, gibibytes in found:
        name, masters, recomputed, tokens, kept = match.groups()
        setup = Setup(
            micro_batch_tokens=int(tokens), master_bytes=4 if masters == "float32" else 2, compiles=True,
            recomputed=int(recomputed) / 100, kept=int(kept) / 100, staging="host",
            num_micro_batches=batch_tokens[name] // int(tokens),
        )  # fmt: skip
        items = peak(role_memory("policy", KNOWN[name], 1, setup), "step").device
        planned = total([item for item in items if item.name != CONTEXT])
        assert planned == pytest.approx(gibibytes * 2**30, rel=0.1), match[0]


@pytest.mark.parametrize(
    ("num_tokens", "measured"),
    [(9221, (4.971, 2.806, 2.089)), (36869, (8.732, 4.742, 2.694)), (147461, (24.34, 12.71, 6.707))],
)
def test_ranks_that_share_long_sequences_need_the_memory_that_was_measured_on_an_h200(
    num_tokens: int, measured: tuple[float, ...]
) -> None:
    """GiB of a rank, by `bench/gpu/long_sequences.py`: one micro-batch over one, two and four ranks."""
    model = replace(KNOWN["1.5b"], num_layers=4, vocabulary_size=32768)
    for num_ranks, gibibytes in zip((1, 2, 4), measured, strict=True):
        setup = Setup(-(-num_tokens // num_ranks), sequence_parallel=num_ranks, num_micro_batches=1)
        items = peak(role_memory("policy", model, num_ranks, setup), "step").device
        planned = total([item for item in items if item.name not in (CONTEXT, STAGED)])
        assert planned == pytest.approx(gibibytes * 2**30, rel=0.06)


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
    with pytest.raises(InvalidInput, match="70b does not fit on 256 tiny; take larger GPUs"):
        _plan("70b", replace(GPUS["l40s"], name="tiny", memory_bytes=12e9), "standalone")


# ── the forecast of a run ──


def test_a_learner_that_is_slower_than_its_servers_never_waits() -> None:
    found = forecast(FLEET | {"train_s": 60})
    assert (found["step_s"], found["idle_share"]) == (60.5, 0)
    assert found["staleness_mean"] == FLEET["max_staleness"], "groups that are ready wait their turn"


def test_servers_that_are_slower_than_the_learner_set_the_pace() -> None:
    found = forecast(FLEET | {"train_s": 1})
    assert found["groups_per_s"] == pytest.approx(4 * 8 / 10, rel=0.02)
    assert found["idle_share"] == pytest.approx(1 - 1.5 / found["step_s"])
    assert found["busy_share"] == 1
    assert found["staleness_mean"] == pytest.approx((5 + 1 + 1) / found["step_s"]), "trained as soon as it is ready"


@pytest.mark.parametrize("groups_per_step", [16, 64])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("slots", [16, 64, 256])
def test_the_pace_agrees_with_a_simulation_of_every_group(groups_per_step: int, max_staleness: int, slots: int) -> None:
    """With one sample a group and a speed that does not depend on the load, a group takes as long as its tokens."""
    simulation = runpy.run_path(str(ROOT / "bench" / "simulate_parts" / "token_simulation.py"))
    for train_s, push_s in itertools.product((1.0, 5.0, 10.0, 40.0), (0.2, 3.0)):
        fleet = simulation["TokenFleet"](
            num_servers=4, samples_at_once=slots // 4, step_s_of=lambda num_running: 0.02, mean_tokens=500,
            length_variation=GROUP_VARIATION, max_tokens=500 * LONGEST_GROUP, num_samples=1,
            groups_per_step=groups_per_step, max_staleness=max_staleness,
            train_s_of=lambda tokens, train_s=train_s: train_s, push_s=push_s, pause_s=0.1, num_steps=30,
        )  # fmt: skip
        simulated = simulation["simulate_tokens"](fleet)
        found = pace((train_s, 0.0, push_s, 0.1), 10, slots, max_staleness, groups_per_step)
        assert found.step_s == pytest.approx(simulated.step_s, rel=0.25), fleet
        assert found.learner_idle == pytest.approx(simulated.wait_share, abs=0.15), fleet
        if found.servers_idle > 0.05 or found.learner_idle > 0.05:  # otherwise the queue may fill, or may not
            # Half a group's versions are younger than the one that its first token is of, which the simulation counts.
            youngest = simulated.staleness_mean - found.generation_s / found.step_s
            assert youngest - 0.5 <= found.staleness <= simulated.staleness_mean + 0.5, fleet


def test_without_staleness_training_is_synchronous() -> None:
    found = forecast(FLEET | {"max_staleness": 0})
    assert found["staleness_mean"] == 0
    assert found["idle_share"] > 0.4, "it waits for every group of its own step"


def test_a_pause_and_failures_cost_what_they_cost() -> None:
    busy = FLEET | {"train_s": 1}
    undisturbed, paused = forecast(busy), forecast(busy | {"pause_s": 3.1})
    assert paused["step_s"] - undisturbed["step_s"] == pytest.approx(3.0)
    failing = forecast(busy | {"server_mtbf_s": 700})
    assert failing["groups_per_s"] == pytest.approx(undisturbed["groups_per_s"] * 0.695, rel=0.01)


def test_groups_that_are_trained_in_order_wait_for_the_slowest() -> None:
    uneven = FLEET | {"num_servers": 16}
    waiting, correcting, dropping = (forecast(uneven | {"stale_policy": name}) for name in ("wait", "correct", "drop"))
    assert waiting["step_s"] >= correcting["step_s"] == dropping["step_s"]
    synchronous = forecast(uneven | {"max_staleness": 0})
    assert synchronous["step_s"] == forecast(uneven | {"max_staleness": 0, "stale_policy": "wait"})["step_s"]


@given(
    num_servers=st.integers(1, 6), concurrent_groups=st.integers(1, 5), groups_per_step=st.integers(1, 12),
    max_staleness=st.integers(0, 3), train_s=st.floats(0.1, 20), push_s=st.floats(0, 20), pause_s=st.floats(0, 1),
    stale_policy=st.sampled_from(["wait", "drop", "correct"]), group_s=st.floats(0.1, 100),
)  # fmt: skip
def test_a_forecast_is_within_its_bounds(**fields: Any) -> None:
    found = forecast(fields)
    assert 0 <= found["staleness_mean"] <= fields["max_staleness"]
    assert 0 <= found["idle_share"] <= 1 and 0 <= found["busy_share"] <= 1
    assert forecast(fields | {"num_servers": 100})["step_s"] <= found["step_s"]
    assert forecast(fields | {"max_staleness": 9})["step_s"] <= found["step_s"]


# ── commands ──


def test_the_sizing_guide_is_the_one_of_the_plans() -> None:
    built = runpy.run_path(str(ROOT / "docs" / "make_sizing.py"))["build"]()
    assert (ROOT / "docs" / "sizing.md").read_text() == built, "run: python docs/make_sizing.py"


def test_plan_shows_its_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", "7b", "--gpu", "h200"]) == 0
    text = capsys.readouterr().out
    for part in (
        "standalone",
        "split-collocate",
        "P x 8 B / ",
        "load ",
        "gather ",
        "on the host",
        "KV cache",
        "tokens/s",
        "staleness",
        "push",
    ):
        assert part in text
    words = ["--model", "0.5b", "--placement", "standalone", "--learner.compile", "true", "--max-staleness", "0"]
    assert cli.main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert "compile: true" in text and "max_staleness: 0" in text and '{"' not in text
    assert cli.main(["plan", *words, "--json"]) == 0
    [planned] = json.loads(capsys.readouterr().out)
    assert planned["placement"] == "standalone" and planned["config"]["replay"]["max_staleness"] == 0
    for peak_gb, items in re.findall(r", ([\d.]+) of 80 GB .*\n((?:  .+ GB.*\n)+)", text):
        sizes = [float(size) for size in re.findall(r"^  \D+([\d.]+) GB(?:  |$)", items, re.M)]
        assert sum(sizes) == pytest.approx(float(peak_gb), abs=0.1)


def test_plan_says_whether_a_configuration_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
             "num_key_value_heads": 4, "vocab_size": 152064}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    file = tmp_path / "run.yaml"

    def plan(num_ranks: int, gpu: str, **learner: Any) -> tuple[int, str]:
        shares = {"num_ranks": num_ranks, "gpus_per_rank": 0.75}, {"num_ranks": num_ranks, "gpus_per_rank": 0.25}
        given = {"placement": "split-collocate", "policy": shares[0], "reference": shares[1],
                 "algorithm": {"kl": {"placement": "loss"}}} | learner  # fmt: skip
        config = {
            "model": {"path": str(tmp_path), "dtype": "bfloat16"},
            "learner": given,
            "weights": {"staging": "host"},
        }
        file.write_text(json.dumps(config))
        code = cli.main(["plan", "--config", str(file), "--gpu", gpu])
        return code, capsys.readouterr().out

    code, text = plan(4, "h100")
    assert code == 0 and "policy + reference: 63." in text and "fits" in text and "GPUs          4" in text
    assert re.search(r"policy +4 x 0.75 GPU +load \d+\.\d, step 47.3, gather 34.8, push 34.8 GB; \d+", text)
    code, text = plan(1, "h100")
    assert code == 1 and "does not fit" in text
    assert plan(1, "h100", lora={"rank": 8, "alpha": 16}, master_dtype="bfloat16")[0] == 0
    other = {"path": str(tmp_path), "num_ranks": 4, "gpus_per_rank": 0.25}
    code, text = plan(4, "h100", lora={"rank": 8, "alpha": 16}, reference=other)
    assert code == 0 and re.search(r"reference +4 x 0.25 GPU +load [1-9]", text)


@pytest.mark.parametrize(("size_gb", "code"), [(8, 0), (4, 1)])
def test_a_run_without_gpus_is_judged_by_this_machine(
    size_gb: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = HostMemory(available_bytes=10**9, size_bytes=size_gb * 10**9)
    monkeypatch.setattr(plan, "measure_memory", lambda: memory)
    demo = str(ROOT / "examples" / "arithmetic" / "demo.yaml")
    assert cli.main(["plan", "--config", demo]) == code
    text = capsys.readouterr().out
    assert re.search(r"policy +2 x \d\.\d GB", text) and "h100" not in text
    assert ("does not fit" in text) == bool(code) and f"of {size_gb}.0 GB" in text
    assert cli.main(["plan", "--config", demo, "--gpu", "h200"]) == 0
    assert "policy: " in capsys.readouterr().out


FAILING = {
    "num-servers": 3, "concurrent-groups": 4, "group-s": 60, "groups-per-step": 8, "max-staleness": 1, "train-s": 9,
    "server-mtbf-s": 50,
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["plan", "--gpu", "h900"], "--gpu h900 is not known; choose one of"),
        (["plan", "--model", "7b", "--config", "a.yaml"], "--model and --config both name a model; omit --model"),
        (["plan", "--config", "a.yaml", "--json"], "--json prints deployments; add --gpus N"),
        (["plan", "--model", "/nowhere"], "--model /nowhere is neither one of"),
        (["simulate", "--num-servers", "3"], "missing: --concurrent-groups, --group-s, --groups-per-step"),
        (["simulate", "--run-dir", "/nowhere"], "/nowhere/config.yaml does not exist"),
        (
            ["simulate", *(f"--{name}={value}" for name, value in FAILING.items())],
            "--server-mtbf-s must be longer than --group-s",
        ),
        (["plan", "--replay.groups_per_stp", "4"], "groups_per_step"),
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
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row | {"step": n}) + "\n" for n in range(9)))
    name = "penstock_rollout_episode_duration_seconds"
    (tmp_path / "metrics.txt").write_text(f"{name}_count 10.0\n{name}_sum 25.0\n")
    words = ["--run-dir", str(tmp_path), "--rollout-metrics", str(tmp_path / "metrics.txt"), "--json"]
    assert cli.main(["simulate", *words, "--concurrent-groups", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"]["group_s"] == 2.5 and result["model"]["train_s"] == pytest.approx(0.9)
    assert result["measured"]["idle_share"] == pytest.approx(1 / 3)
    assert result["forecast"]["step_s"] == pytest.approx(8 * 2.5 / 4, rel=0.1), "four at once, eight per step"
