"""Routers of a mixture of experts: the auxiliary loss, the load of the experts, and replaying an engine's choice."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from penstock.config.learner import LearnerConfig, RouterConfig
from penstock.config.loading import validate
from penstock.errors import ConfigError
from penstock_learner.batches.partition import RankShard, partition
from penstock_learner.batches.sequence_batch import SequenceBatch, batch_of
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.attention.sequence_parallel import SequenceParallel
from penstock_learner.model.causal_lm import CausalLM, load_model
from penstock_learner.model.routers import _laid_out, find_routers, watch_routers
from penstock_learner.roles.dispatch import UpdateReport
from penstock_learner.roles.policy import PolicyWorker
from penstock_learner.start_check import _check_structure
from penstock_learner.steps.program import denominators_of, with_advantages
from penstock_learner.steps.step_result import router_metrics
from support.groups import make_group
from support.learner_ranks import make_rank, with_model
from support.tiny_architectures import random_batch, tiny_model

CPU = torch.device("cpu")
NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 4, 2
FAST = {"qwen3_moe", "gpt_oss", "deepseek_v3"}
_EXPERTS = """
    afmoe aria_text cohere2_moe deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe glm4_moe_lite
    gpt_oss granitemoe granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 laguna lfm2_moe mellum mimo_v2_flash
    minimax_m2 mixtral olmoe qwen2_moe qwen3_moe solar_open
"""
EXPERTS = _EXPERTS.split()
"""Architectures whose routers can be watched."""


def _watched(name: str, folder: Path, **router: Any) -> CausalLM:
    if not (folder / "config.json").exists():
        tiny_model(name).save_pretrained(folder)
    model = load_model(folder, torch.float32, 16)
    model.watch = watch_routers(model.lm, LearnerConfig(router=RouterConfig(**router)))
    return model


def _batch(experts: np.ndarray[Any, Any] | None = None) -> SequenceBatch:
    batch: SequenceBatch = random_batch()
    return replace(batch, routed_experts=experts)


def _expected_loss(lm: Any, batch: SequenceBatch) -> torch.Tensor:
    """By transformers' own function, from the logits of each sequence by itself, without padding."""
    function = importlib.import_module(type(lm).__module__).load_balancing_loss_func
    parts, start = [], 0
    for length in batch.lengths:
        ids = torch.as_tensor(batch.token_ids[start : start + length]).unsqueeze(0)
        parts.append(lm(input_ids=ids, use_cache=False, output_router_logits=True).router_logits)
        start += length
    joined = tuple(torch.cat([logits.flatten(0, -2) for logits in layer]) for layer in zip(*parts, strict=True))
    loss: torch.Tensor = function(joined, NUM_EXPERTS, TOP_K)
    return loss


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_the_auxiliary_loss_is_that_of_transformers_without_padding(name: str, padded: bool, tmp_path: Path) -> None:
    model, batch = _watched(name, tmp_path, aux_loss_coefficient=0.1), _batch()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    wanted = _expected_loss(plain, batch)
    wanted.backward()
    if padded:
        model.lm.set_attn_implementation("eager")
    model(ModelInputs.of(batch, CPU), padded=padded)
    assert model.watch is not None
    balance = model.watch.balance()
    assert balance is not None
    balance.loss.backward()
    torch.testing.assert_close(balance.loss, wanted, rtol=1e-4, atol=1e-5)
    assert float(balance.loss.detach()) > TOP_K
    assert balance.counts.sum(dim=1).tolist() == [int(batch.lengths.sum()) * TOP_K] * NUM_LAYERS
    for router in find_routers(model.lm):
        expected = plain.get_submodule(router.name).weight.grad
        torch.testing.assert_close(router.module.weight.grad, expected, rtol=1e-3, atol=1e-6)


def _policy(folder: Path, **learner: Any) -> PolicyWorker:
    settings = {"lr": 1e-30, "max_grad_norm": 1e30, "algorithm": {"kl": {"placement": "none"}}} | learner
    return make_rank(PolicyWorker, validate(with_model({"learner": settings}, folder), "test"))


def _update(policy: PolicyWorker, batch: SequenceBatch, max_tokens: int = 10**6) -> UpdateReport:
    batch = with_advantages(batch, policy.config.learner.algorithm, 0.0)
    shards = partition(batch, 2 if max_tokens < 100 else 1, max_tokens)
    joined = RankShard([m for s in shards for m in s.micro_batches], [part for s in shards for part in s.sequences])
    return policy.update(joined, denominators_of(batch, policy.config.learner.algorithm.loss), 1, 0, 0.0)


def _router_gradients(policy: PolicyWorker) -> torch.Tensor:
    return torch.cat([router.module.weight.grad.flatten() for router in find_routers(policy.model.lm)])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("checkpointed", [0.0, 1.0], ids=["kept", "recomputed"])
def test_the_loss_of_an_update_gets_the_auxiliary_loss(checkpointed: float, tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    batch = batch_of([make_group(prompt_id) for prompt_id in (1, 2)])
    batch = replace(batch, old_log_probs=batch.behaviour_log_probs)
    gradients = []
    for coefficient in (0.0, 0.5):
        router = {"aux_loss_coefficient": coefficient}
        policy = _policy(tmp_path, router=router, activation_checkpointing=checkpointed)
        report = _update(policy, batch)
        gradients.append(_router_gradients(policy))
    assert report.routers is not None and report.routers.aux_loss > TOP_K
    model = _watched("qwen3_moe", tmp_path, aux_loss_coefficient=1.0)
    model(ModelInputs.of(batch, CPU))
    assert model.watch is not None and (balance := model.watch.balance()) is not None
    balance.loss.backward()
    expected = torch.cat([router.module.weight.grad.flatten() for router in find_routers(model.lm)])
    torch.testing.assert_close(gradients[1] - gradients[0], 0.5 * expected, rtol=1e-3, atol=1e-6)
    assert report.routers.aux_loss == pytest.approx(float(balance.loss.detach()), rel=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_parts_of_an_update_are_weighted_by_their_trained_tokens(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    batch = batch_of([make_group(prompt_id) for prompt_id in (1, 2, 3)])
    batch = replace(batch, old_log_probs=batch.behaviour_log_probs)
    policy = _policy(tmp_path, router={"aux_loss_coefficient": 0.1})
    whole, split = _update(policy, batch).routers, _update(policy, batch, max_tokens=30).routers
    assert whole is not None and split is not None
    # Every token is counted once, also where a rank has a micro-batch that only fills up.
    np.testing.assert_array_equal(whole.counts, split.counts)
    assert whole.counts.sum() == batch.lengths.sum() * TOP_K * NUM_LAYERS
    assert split.aux_loss >= whole.aux_loss > 0 and split.aux_loss < NUM_EXPERTS * TOP_K


def test_the_load_of_the_experts_is_relative_to_their_layer() -> None:
    class Report:
        """The part of an UpdateReport that is read."""

        def __init__(self, *counts: list[float]) -> None:
            from penstock_learner.roles.dispatch import RouterReport

            self.routers = RouterReport(1.5, np.array(counts, dtype=np.float32), 0.5)

    ranks: Any = [Report([2, 2, 0, 0], [1, 1, 1, 1]), Report([6, 2, 0, 0], [1, 1, 1, 1])]
    metrics = router_metrics([ranks])
    assert metrics == pytest.approx(
        {
            "router_aux_loss": 3.0,
            "expert_load_max": 8 / 3,
            "unused_expert_ratio": 0.25,
            "router_replayed_ratio": 1.0,
        }
    )


def _cases() -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.long) for name in EXPERTS]


@pytest.mark.parametrize("name", _cases())
def test_replaying_its_own_choice_changes_nothing_and_another_choice_is_used(name: str, tmp_path: Path) -> None:
    own = _watched(name, tmp_path, replay=True)
    assert own.watch is not None
    wanted, _ = own(ModelInputs.of(_batch(), CPU))
    plain = own.watch.balance()
    assert plain is not None and float(plain.replayed_share) == 0
    random = np.random.default_rng(0)
    num_tokens, num_experts = int(_batch().lengths.sum()), own.watch.routers[0].num_experts
    top_k = round(float(plain.counts[0].sum()) / num_tokens)
    rows = [random.permutation(num_experts)[:top_k] for _ in range(num_tokens * NUM_LAYERS)]
    other = np.array(rows, dtype=np.int16).reshape(num_tokens, NUM_LAYERS, top_k)
    changed, _ = own(ModelInputs.of(_batch(other), CPU))
    changed.sum().backward()
    balance = own.watch.balance()
    assert balance is not None and float(balance.replayed_share) == pytest.approx(1.0)
    for index, router in enumerate(own.watch.routers):
        expected = np.bincount(other[:, router.layer].flatten(), minlength=num_experts)
        assert balance.counts[index].tolist() == expected.tolist()
    assert float((changed - wanted).detach().abs().max()) > 1e-2
    gradient = next(own.watch.routers[0].module.parameters()).grad
    assert gradient is not None and bool(gradient.abs().sum() > 0), "the scores of the replayed experts are trained"
    unknown = np.full_like(other, -1)
    repeated = np.zeros_like(other)
    too_large = other + num_experts
    for ignored in (unknown, repeated, too_large):
        again, _ = own(ModelInputs.of(_batch(ignored), CPU))
        assert torch.equal(again, wanted)


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_the_weights_of_replayed_experts_are_the_routers_own_scores(padded: bool, tmp_path: Path) -> None:
    """A model whose routers choose the replayed experts by themselves gives the same log-probs."""
    model = _watched("qwen3_moe", tmp_path, replay=True)
    other = load_model(tmp_path, torch.float32, 16)
    experts = np.zeros((int(_batch().lengths.sum()), NUM_LAYERS, TOP_K), dtype=np.int16)
    experts[:] = (3, 1)
    for router in find_routers(other.lm):
        module = router.module

        def forward(states: torch.Tensor, module: Any = module) -> Any:
            logits = torch.nn.functional.linear(states.reshape(-1, states.shape[-1]), module.weight)
            scores = logits.softmax(dim=-1)[:, [3, 1]]
            chosen = torch.tensor([3, 1]).expand(len(logits), 2)
            return logits, scores / scores.sum(dim=-1, keepdim=True) if module.norm_topk_prob else scores, chosen

        module.forward = forward
    for lm in (model.lm, other.lm) if padded else ():
        lm.set_attn_implementation("eager")
    wanted, _ = other(ModelInputs.of(_batch(), CPU), padded=padded)
    found, _ = model(ModelInputs.of(_batch(experts), CPU), padded=padded)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("llama", {"aux_loss_coefficient": 0.1}, "llama has no routers that can be watched"),
        ("jetmoe", {"replay": True}, "several routers in a layer"),
        ("zaya", {"replay": True}, "chooses one expert per token"),
    ],
)
def test_a_model_without_usable_routers_is_refused_before_anything_starts(
    name: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    config = validate(with_model({"learner": {"router": settings}}, tmp_path), "test")
    with pytest.raises(ConfigError, match=reason) as raised:
        _check_structure(config)
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=reason):
        watch_routers(load_model(tmp_path, torch.float32, 16).lm, config.learner)


def test_a_router_that_chooses_in_another_way_is_refused(tmp_path: Path) -> None:
    model = _watched("phimoe", tmp_path, replay=True)
    with pytest.raises(ConfigError, match="does not choose by topk"):
        model(ModelInputs.of(_batch(), CPU))


def _passes(model: CausalLM, batch: SequenceBatch) -> tuple[torch.Tensor, ...]:
    """Log-probs, gradients, and what the routers did in a forward and backward pass with the auxiliary loss."""
    model.zero_grad()
    log_probs, _ = model(ModelInputs.of(batch, CPU))
    assert model.watch is not None and (balance := model.watch.balance()) is not None
    (log_probs.sum() + 0.1 * balance.loss).backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return log_probs.detach(), torch.cat(gradients), balance.counts, balance.replayed_share


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch makes it while it traces an autograd function
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # and this one of a layer's input
@pytest.mark.parametrize("name", _cases())
def test_compiled_layers_replay_and_measure_the_same(name: str, tmp_path: Path) -> None:
    model = _watched(name, tmp_path, replay=True, aux_loss_coefficient=0.1)
    assert model.watch is not None
    random, shape = np.random.default_rng(0), (int(_batch().lengths.sum()), NUM_LAYERS, TOP_K)
    num_experts = model.watch.routers[0].num_experts
    replayed = random.permuted(np.broadcast_to(np.arange(num_experts), (*shape[:2], num_experts)), axis=2)[..., :TOP_K]
    batches = [_batch(), _batch(replayed.astype(np.int16))]
    wanted = [_passes(model, batch) for batch in batches]
    assert float(wanted[1][3]) > 0.999 and not torch.equal(wanted[0][0], wanted[1][0])
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    for index, layer in enumerate(model.lm.model.layers):
        layer.forward = torch.compile(layer.forward, backend=keep, fullgraph=True)
        if index < NUM_LAYERS // 2:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    for batch, expected in zip(batches, wanted, strict=True):
        torch.testing.assert_close(_passes(model, batch), expected)
    kinds = {(type(layer), *(type(module) for module in layer.modules())) for layer in model.lm.model.layers}
    windows = {getattr(module, "packed_layer_type", None) for module in model.lm.modules()} - {None}
    assert len(graphs) <= 2 * len(kinds) * max(len(windows), 1), "layers of a kind share their programs"


def test_ranks_that_share_sequences_replay_and_count_every_token_once() -> None:
    batch = _batch(np.arange(sum(_batch().lengths), dtype=np.int16)[:, None, None])
    seen = []
    for rank in range(3):
        group: Any = None
        inputs = ModelInputs.of(batch, CPU, SequenceParallel(group, rank, 3))
        counted, experts = _laid_out(inputs, False, inputs.routed_experts)
        assert counted is not None and experts is not None and len(counted) == len(experts)
        is_token = counted > 0
        assert (experts[~is_token] == -1).all()
        seen += experts[is_token].flatten().tolist()
    assert seen == list(range(int(batch.lengths.sum())))
