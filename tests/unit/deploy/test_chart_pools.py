"""Pools of rollout servers: each has its own hardware, engine, number and grace period, and all serve one run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.chart import LOADER, Manifest, declare, needs_helm, of_kind, one, render, run_config, run_helm

pytestmark = needs_helm
POOLS: list[dict[str, Any]] = [
    {"name": "h200", "replicas": 4, "nodeSelector": {"gpu": "h200"}, "priorityClassName": "high"},
    {
        "name": "spot", "spot": True, "gpus": 2, "maxConcurrentGroups": 100, "gpuResource": "amd.com/gpu",
        "engine": {"tensor_parallel_size": 2, "extra": {"swap_space": 0}, "kv_cache_bytes": 68719476736},
        "autoscaling": {"enabled": True, "minReplicas": 0, "maxReplicas": 6, "prometheusUrl": "http://prometheus:9090"},
        "image": {"repository": "penstock/rollout-sglang"},
    },
]  # fmt: skip
TWO_SCALED = [POOLS[1] | {"drainSeconds": 90}, POOLS[1] | {"name": "more", "maxConcurrentGroups": 300}]


def pooled(pools: list[dict[str, Any]]) -> str:
    return f"--set-json=rollout.pools={json.dumps(pools)}"


declare((pooled(POOLS),), (pooled(TWO_SCALED),))


def test_each_pool_has_its_own_settings_and_the_common_ones() -> None:
    manifests = render(pooled(POOLS))
    h200, spot = (one(manifests, "StatefulSet", f"rollout-{name}")["spec"] for name in ("h200", "spot"))
    assert not [m for m in of_kind(manifests, "StatefulSet") if m["metadata"]["name"].endswith("-rollout")]
    assert h200["replicas"] == 4 and "replicas" not in spot
    pods = {name: spec["template"]["spec"] for name, spec in (("h200", h200), ("spot", spot))}
    assert pods["h200"]["nodeSelector"] == {"gpu": "h200"} and pods["h200"]["priorityClassName"] == "high"
    limits = [pods[name]["containers"][0]["resources"]["limits"] for name in ("h200", "spot")]
    assert limits[0]["nvidia.com/gpu"] == 1 and limits[1]["amd.com/gpu"] == 2
    assert limits[0]["memory"] == limits[1]["memory"] == "64Gi", "the common setting"
    assert pods["spot"]["containers"][0]["image"] == "penstock/rollout-sglang:0.1.0"
    names = [pool["spec"]["serviceName"] for pool in of_kind(manifests, "StatefulSet", "-rollout-")]
    assert set(names) == {one(manifests, "Service", "-rollout")["metadata"]["name"]}


def test_pools_differ_in_their_arguments_which_the_server_reads(tmp_path: Path) -> None:
    manifests = render(pooled(POOLS))
    pools = [one(manifests, "StatefulSet", f"rollout-{name}")["spec"]["template"]["spec"] for name in ("h200", "spot")]
    plain, own = (
        [word for word in pool["containers"][0]["args"] if word.startswith(("--rollout.engine", "--rollout.max"))]
        for pool in pools
    )
    assert plain == []
    rollout = run_config(manifests, tmp_path, *own).rollout
    assert (rollout.engine.tensor_parallel_size, rollout.max_concurrent_groups) == (2, 100)
    assert rollout.engine.extra == {"swap_space": 0} and rollout.engine.kv_cache_bytes == 64 * 2**30


def test_a_pool_has_its_own_budget_and_spread() -> None:
    manifests = render(pooled(POOLS))
    for name in ("h200", "spot"):
        template = one(manifests, "StatefulSet", f"rollout-{name}")["spec"]["template"]
        labels = template["metadata"]["labels"]
        others = [one(manifests, "StatefulSet", f"rollout-{other}")["spec"]["template"]["metadata"]["labels"]
                  for other in {"h200", "spot"} - {name}]  # fmt: skip
        budget = one(manifests, "PodDisruptionBudget", f"rollout-{name}")["spec"]["selector"]["matchLabels"]
        [spread] = template["spec"]["topologySpreadConstraints"]
        for selector in (budget, spread["labelSelector"]["matchLabels"]):
            assert selector.items() <= labels.items() and not selector.items() <= others[0].items()


def test_a_spot_server_gives_its_prompts_back_within_a_notice_of_thirty_seconds() -> None:
    spot = one(render(pooled(POOLS)), "StatefulSet", "rollout-spot")["spec"]["template"]
    assert spot["spec"]["terminationGracePeriodSeconds"] < 30
    assert spot["metadata"]["labels"]["penstock/spot"] == "true"
    tolerated = {toleration["key"] for toleration in spot["spec"]["tolerations"]}
    assert {"nvidia.com/gpu", "cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority"} == tolerated
    own = one(render(pooled(TWO_SCALED)), "StatefulSet", "rollout-spot")["spec"]["template"]
    assert own["spec"]["terminationGracePeriodSeconds"] == 105, "on clouds with a longer notice"


def test_scaled_pools_share_what_fixed_servers_leave() -> None:
    [trigger] = one(render(pooled(POOLS)), "ScaledObject")["spec"]["triggers"]
    assert trigger["metadata"]["query"].startswith("clamp_min(max(")
    assert trigger["metadata"]["query"].endswith("- 256, 0) * 1"), "four servers of 64 groups are fixed"
    assert trigger["metadata"]["threshold"] == "100"
    shares = [s["spec"]["triggers"][0]["metadata"]["query"].rpartition("* ")[2]
              for s in of_kind(render(pooled(TWO_SCALED)), "ScaledObject")]  # fmt: skip
    assert shares == ["0.25", "0.75"]


WIDE = {
    "name": "wide",
    "nodes": 2,
    "gpus": 8,
    "engine": {"tensor_parallel_size": 8, "extra": {"pipeline_parallel_size": 2}},
}
OVER_NODES = (pooled([WIDE]), "--set=rollout.replicas=3")
declare(OVER_NODES)


def test_a_server_over_several_nodes_is_a_leader_worker_set() -> None:
    manifests = render(*OVER_NODES)
    assert not of_kind(manifests, "StatefulSet", "rollout")
    spec = one(manifests, "LeaderWorkerSet")["spec"]
    group = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], group["size"], group["restartPolicy"]) == (3, 2, "RecreateGroupOnPodRestart")
    leader, worker = (group[f"{part}Template"]["spec"]["containers"][0] for part in ("leader", "worker"))
    for container in (leader, worker):
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert container["image"] == leader["image"], "the engine's workers load Penstock's extension"
        assert {"name": "RAY_AUTH_MODE", "value": "token"} in container["env"]
    assert "exec penstock" in leader["command"][2] and "ray start --head" in leader["command"][2]
    assert "$LWS_LEADER_ADDRESS" in worker["command"][2] and "redis-password" not in str(worker["volumeMounts"])
    extra = '{"distributed_executor_backend":"ray","pipeline_parallel_size":2}'
    assert f"--rollout.engine.extra={extra}" in leader["args"]
    rules = one(manifests, "NetworkPolicy", "-rollout")["spec"]["ingress"]
    peers = [rule["from"][0]["podSelector"]["matchLabels"].get("app.kubernetes.io/component")
             for rule in rules if "ports" not in rule]  # fmt: skip
    assert peers == ["rollout"], "the nodes of a server reach each other"


def big_fleet() -> list[dict[str, Any]]:
    return [
        {"name": f"pool-{number}", "replicas": 100, "nodeSelector": {"gpu": f"type-{number}"}, "spot": number % 2 == 1}
        for number in range(10)
    ]


def test_a_thousand_servers_in_ten_pools_stay_small(capsys: pytest.CaptureFixture[str]) -> None:
    """Objects grow with the number of pools, not of servers, and stay far below the API server's 1.5 MiB and the 1 MiB
    of the Secret in which Helm stores a release."""
    timed: list[float] = []
    texts: list[str] = []
    for options in ((), (pooled(big_fleet()),)):
        started = time.perf_counter()
        result = run_helm("template", *options)
        timed.append(time.perf_counter() - started)
        assert result.returncode == 0, result.stderr
        texts.append(result.stdout)
    manifests: list[Manifest] = [m for m in yaml.load_all(texts[1], Loader=LOADER) if m]  # noqa: S506  (it is safe)
    pools = of_kind(manifests, "StatefulSet", "-rollout-")
    assert len(pools) == 10 and sum(pool["spec"]["replicas"] for pool in pools) == 1000
    sizes = {f"{m['kind']} {m['metadata']['name']}": len(json.dumps(m)) for m in manifests}
    largest = max(sizes, key=lambda name: sizes[name])
    with capsys.disabled():
        print(
            f"\n1,000 servers in 10 pools: {len(manifests)} objects, {sum(sizes.values()) / 1024:.0f} KiB, "
            f"largest {largest} with {sizes[largest] / 1024:.1f} KiB; "
            f"rendered in {timed[1]:.2f} s, one pool in {timed[0]:.2f} s"
        )
    assert max(sizes.values()) < 32 * 1024 and sum(sizes.values()) < 256 * 1024
    assert len(texts[1]) - len(texts[0]) < 10 * 16 * 1024
