"""Which trajectories are compared, and what is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.trajectory import Group, Sampling
from penstock_learner.agreement import servers as samples
from penstock_learner.agreement.servers import PER_SERVER, choose, compare
from support.groups import made_by, make_group


def from_server(server: str, group: Group) -> Group:
    return replace(group, server_id=server)


def test_every_server_and_every_version_has_samples() -> None:
    old = [from_server("a", made_by(number, 3)) for number in range(8)]
    groups = [*old, from_server("a", made_by(8, 4)), from_server("b", made_by(9, 2))]
    found = choose(groups, step=1)
    versions = [(sample.group.server_id, sample.trajectory.min_version) for sample in found]
    assert set(versions) == {("a", 4), ("a", 3), ("b", 2)}
    of_a = [sample for sample in found if sample.group.server_id == "a"]
    assert len(of_a) == PER_SERVER and of_a[0].trajectory.min_version == 4, "the newest come first"
    assert len({sample.group.prompt_id for sample in of_a}) == 9, "of different groups first"


def test_baselines_and_masked_samples_are_skipped() -> None:
    group = make_group(1)
    first, second, *rest = group.trajectories
    masked = replace(second, loss_mask=np.zeros_like(second.loss_mask))
    marked = replace(group, trajectories=(replace(first, is_baseline=True), masked, *rest))
    assert [sample.trajectory for sample in choose([marked], step=1)] == rest


def test_the_budget_of_tokens_is_shared_over_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MIN_BUDGET_TOKENS", 20)
    groups = [from_server(f"s{number}", make_group(number, num_samples=1)) for number in range(30)]
    turns = [{sample.group.server_id for sample in choose(groups, step)} for step in range(60)]
    assert max(map(len, turns)) < 15
    assert set.union(*turns) == {f"s{number}" for number in range(30)}
    assert all("s7" in {s.group.server_id for s in choose(groups, step, first=["s7"])} for step in range(20))


def test_trained_tokens_are_compared() -> None:
    group = replace(make_group(1, num_samples=2), sampling=Sampling(top_p=0.5))
    first, second = group.trajectories
    mask = first.loss_mask.copy()
    mask[0] = 0
    group = replace(group, trajectories=(replace(first, loss_mask=mask), second))
    chosen = choose([group], step=1)
    log_probs = np.concatenate([sample.trajectory.log_probs for sample in chosen])
    log_probs[0] += 100  # it is not trained
    log_probs[len(first.token_ids) :] += 0.25
    one, two = compare(chosen, [0, 3], log_probs)
    assert (one.server_id, one.staleness, one.num_tokens) == ("rollout-0", 0, len(first.token_ids) - 1)
    assert (one.mean_nats, two.mean_nats, two.staleness) == pytest.approx((0.0, 0.25, 3), abs=1e-6)
    assert one.nucleus_nats == pytest.approx(np.log(2))
