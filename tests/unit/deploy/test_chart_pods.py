"""The pods of the chart: which roles share a pod, what they may do, and how they start and end."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from penstock.config.gpu_bundles import num_gpus
from support.chart import (
    CHANGED,
    OPTIONS,
    PLACEMENTS,
    VALUES,
    Manifest,
    declare,
    further,
    needs_helm,
    of_kind,
    one,
    pod_templates,
    render,
    render_changed,
    run_config,
)  # fmt: skip

pytestmark = needs_helm


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_worker_groups_hold_the_bundles_of_the_placement(placement: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from penstock_learner.roles.ray_cluster import active_resource_groups, bundles

    manifests = render(values=placement)
    config = run_config(manifests, tmp_path)
    workers = one(manifests, "RayCluster")["spec"]["workerGroupSpecs"]
    wanted = active_resource_groups(config.learner.placement, config.learner.needed_roles)
    assert [worker["groupName"] for worker in workers] == ["-".join(group) for group in wanted]
    for worker, group in zip(workers, wanted, strict=True):
        for resource, parameter in (("CPU", "num-cpus"), ("GPU", "num-gpus")):
            offered = worker["replicas"] * int(worker["rayStartParams"][parameter])
            assert offered >= sum(bundle.get(resource, 0) for bundle in bundles(group))
        container = worker["template"]["spec"]["containers"][0]
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == worker["rayStartParams"]["num-gpus"]


NO_REFERENCE = ("--set=config.learner.algorithm.kl.placement=none",)
ADAPTER = ("--set=config.learner.lora.rank=8", "--set=config.learner.lora.alpha=16")
ALL_ROLES = ("--set=config.learner.critic.num_ranks=1", "--set=config.learner.reward_model.path=/models/reward")
OWN_ROLE = (
    '--set-json=config.learner.roles={"second_critic": {"worker": "critic", "num_ranks": 2, "gpus_per_rank": 1}}',
)
POOLS = (
    "--set=config.learner.policy.pool=trained,config.learner.critic.pool=trained",
    '--set-json=config.learner.roles={"zebra": {"worker": "critic", "pool": "reference"}, "ape": {"worker": "critic"}}',
    "--set=config.learner.step=x.py:f",
)
declare((*ALL_ROLES, *OWN_ROLE), (*ALL_ROLES, *POOLS), values="split-collocate")


@pytest.mark.parametrize(
    ("arguments", "placement", "groups"),
    [
        (CHANGED, "standalone", ["policy"]),
        (CHANGED, "split-collocate", ["policy"]),
        ((*ALL_ROLES, *OWN_ROLE), "split-collocate", ["policy-reference", "critic-reward-model-second-critic"]),
        ((*ALL_ROLES, *POOLS), "split-collocate", ["policy-critic", "reference", "reward-model-ape", "zebra"]),
        *further(
            ((*ALL_ROLES, *POOLS), "standalone", ["policy-critic", "reference-zebra", "reward-model", "ape"]),
            (ADAPTER, "standalone", ["policy"]),
            ((*ADAPTER, "--set=config.learner.reference.path=/models/other"), "standalone", ["policy", "reference"]),
            (ALL_ROLES, "standalone", ["policy", "reference", "critic", "reward-model"]),
            (ALL_ROLES, "split-collocate", ["policy-reference", "critic-reward-model"]),
            ((*NO_REFERENCE, *OWN_ROLE), "standalone", ["policy", "second-critic"]),
        ),
    ],
)
def test_groups_exist_only_for_roles_that_the_run_needs(
    arguments: tuple[str, ...], placement: str, groups: list[str]
) -> None:
    manifests = render(*arguments, values=placement)
    assert [group["groupName"] for group in one(manifests, "RayCluster")["spec"]["workerGroupSpecs"]] == groups


@pytest.mark.parametrize("values", [*VALUES[:2], *further(*VALUES[2:])])
def test_every_pod_is_locked_down(values: str) -> None:
    manifests = render(*OPTIONS, values=values)
    assert one(manifests, "ServiceAccount")["automountServiceAccountToken"] is False
    templates = dict(pod_templates(manifests))
    assert len(templates) >= 5
    for name, template in templates.items():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"]["requests"]["cpu"], name
            assert container["resources"]["limits"]["memory"], name
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in spec["volumes"]} | _claimed(manifests, name), name


def _claimed(manifests: list[Manifest], name: str) -> set[str]:
    """Volumes for which a StatefulSet makes a claim per pod."""
    templates = [
        m["spec"].get("volumeClaimTemplates", [])
        for m in manifests
        if m["metadata"]["name"] == name and m["kind"] == "StatefulSet"
    ]
    return {claim["metadata"]["name"] for claims in templates for claim in claims}


def test_secrets_come_by_reference_and_each_pod_gets_only_its_own() -> None:
    manifests = render()
    made = [value for m in manifests if m["kind"] == "Secret" for value in m["data"].values()]
    others = str([m for m in manifests if m["kind"] != "Secret"])
    assert made and not [value for value in made if value in others or base64.b64decode(value).decode() in others]
    keys = {
        name: [
            item["key"]
            for volume in template["spec"]["volumes"]
            if "secret" in volume
            for item in volume["secret"]["items"]
        ]
        for name, template in pod_templates(manifests)
    }
    assert keys["test-penstock-gateway"] == ["api-key", "cluster-key", "redis-gateway-password"]
    assert keys["test-penstock-rollout"] == ["cluster-key", "redis-rollout-password"]
    [learner] = [keys[name] for name in keys if "-learner-" in name]
    assert learner == ["cluster-key", "redis-learner-password"]
    assert all("redis" not in key for name in keys if "-ray/" in name for key in keys[name])


@pytest.mark.parametrize("values", [*VALUES[:2], *further(*VALUES[2:])])
def test_redis_passwords_are_files_and_in_no_argument_variable_or_config(values: str, tmp_path: Path) -> None:
    manifests = render(*OPTIONS, values=values)
    config = run_config(manifests, tmp_path)
    assert config.redis.url == "redis://test-penstock-redis:6379/0"
    roles = {"gateway": "gateway", "feed": "gateway", "rollout": "rollout", "learner": "learner"}
    users = {}
    for name, template in pod_templates(manifests):
        for container in template["spec"]["containers"]:
            words = [*container["command"], *container.get("args", [])] if "command" in container else []
            assert not [word for word in words if "PASSWORD" in word or "://" in word and "@" in word], name
            assert not [v["name"] for v in container.get("env", []) if "redis" in str(v).lower()], name
            if container["name"] not in roles:
                continue
            [users[container["name"]]] = [w.partition("=")[2] for w in words if w.startswith("--redis.username=")]
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert config.redis.password_file == Path(mounts["redis-password"]) / "password"
            [volume] = [v["secret"] for v in template["spec"]["volumes"] if v["name"] == "redis-password"]
            key = f"redis-{roles[container['name']]}-password"
            assert (volume["secretName"], volume["items"]) == ("test-penstock-keys", [{"key": key, "path": "password"}])
    assert users == roles


def test_only_learner_and_gateway_reach_the_internal_port() -> None:
    reachable: dict[str, list[str]] = {"metrics": []}
    for rule in one(render(), "NetworkPolicy", "-rollout")["spec"]["ingress"]:
        for port in rule["ports"]:
            labels = [peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer]
            peers = [label.get("app.kubernetes.io/component", "publisher") for label in labels]
            reachable.setdefault(str(port["port"]), []).extend(peers)
    assert reachable == {"weights": ["learner", "gateway"], "1024": ["publisher"], "metrics": []}


@pytest.mark.parametrize("values", [*VALUES[:2], *further(*VALUES[2:])])
def test_a_rollout_server_gets_its_start_budget_and_time_to_drain(values: str) -> None:
    manifests = render_changed(values)
    spec = one(manifests, "StatefulSet", "rollout")["spec"]["template"]["spec"]
    probe = spec["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > 3600
    assert spec["terminationGracePeriodSeconds"] > 120
    [shm] = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory" and shm["emptyDir"]["sizeLimit"]


@pytest.mark.parametrize("values", VALUES)
def test_what_serves_has_probes(values: str) -> None:
    """KubeRay gives its pods their own probes. Jobs that only submit end by themselves."""
    for name, template in pod_templates(render(values=values)):
        container = template["spec"]["containers"][0]
        if "-ray/" in name or "-feed-" in name or name.endswith("-test"):
            continue
        ports = {port["name"] for port in container["ports"]}
        for kind in ("startupProbe", "livenessProbe", *([] if "-learner-" in name else ["readinessProbe"])):
            probe = container[kind]
            called = probe.get("httpGet", probe.get("tcpSocket", {})).get("port")
            assert called in ports or "exec" in probe, f"{name} {kind}"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_ray_pods_stay_until_the_learner_has_written_its_checkpoint(placement: str) -> None:
    manifests = render(*CHANGED, values=placement)
    driver = one(manifests, "Job", "-learner-")["spec"]["template"]["spec"]
    assert driver["terminationGracePeriodSeconds"] == 400
    for name, template in pod_templates(manifests):
        if "-ray/" in name:
            assert template["spec"]["terminationGracePeriodSeconds"] > 400, name
            assert template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"], name


@pytest.mark.parametrize("values", [*VALUES[:2], *further(*VALUES[2:])])
def test_evictions_are_bounded(values: str) -> None:
    manifests = render_changed(values)
    budgets = {
        m["metadata"]["name"].removeprefix("test-penstock-"): m["spec"]
        for m in of_kind(manifests, "PodDisruptionBudget")
    }
    assert budgets["gateway"]["maxUnavailable"] == 1 and budgets["rollout"]["maxUnavailable"] == "25%"
    assert budgets["driver"]["minAvailable"] == 1
    labels = [template["metadata"]["labels"] for _, template in pod_templates(manifests)]
    for name in ("gateway", "rollout", "driver"):
        selector = budgets[name]["selector"]["matchLabels"]
        assert [each for each in labels if selector.items() <= each.items()], name
    clusters = of_kind(manifests, "RayCluster")
    assert ("ray" in budgets) == bool(clusters)
    for cluster in clusters:
        # A percentage needs a controller that counts its pods. These pods have none, so the budget is their number.
        num_workers = sum(group["replicas"] for group in cluster["spec"]["workerGroupSpecs"])
        assert budgets["ray"]["minAvailable"] == 1 + num_workers
        assert budgets["ray"]["selector"]["matchLabels"]["ray.io/cluster"] == cluster["metadata"]["name"]


def test_pods_are_spread() -> None:
    manifests = render()
    for kind, name, keys in (
        ("Deployment", "gateway", ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]),
        ("StatefulSet", "rollout", ["kubernetes.io/hostname"]),
    ):
        template = one(manifests, kind, name)["spec"]["template"]
        spread = template["spec"]["topologySpreadConstraints"]
        assert [constraint["topologyKey"] for constraint in spread] == keys
        for constraint in spread:
            assert constraint["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize("values", [*VALUES[:2], *further(*VALUES[2:])])
def test_every_pod_has_a_network_policy(values: str) -> None:
    manifests = render(*OPTIONS, values=values)
    policies = of_kind(manifests, "NetworkPolicy")
    for name, template in pod_templates(manifests):
        labels = template["metadata"]["labels"]
        assert [policy for policy in policies if _selects(policy["spec"]["podSelector"], labels)], name
    assert not of_kind(render_changed(values), "NetworkPolicy")


def _selects(selector: Manifest, labels: dict[str, str]) -> bool:
    return selector["matchLabels"].items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


def test_one_pod_without_kuberay_holds_every_rank() -> None:
    """Both files for trying the chart out use no custom resource, and as many GPUs as the ranks of all roles share."""
    for values, gpus in (("single-gpu", 1), ("no-gpu", None)):
        manifests = render(values=values)
        assert not of_kind(manifests, "RayCluster")
        template = one(manifests, "Job", "-learner-")["spec"]["template"]
        assert template["metadata"]["labels"]["penstock/publisher"] == "true"
        container = template["spec"]["containers"][0]
        assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
        assert container["command"] == ["penstock", "learner"]
        assert "--learner.publish_host=$(POD_IP)" in container["args"]
    rollout = one(manifests, "StatefulSet", "rollout")["spec"]["template"]["spec"]["containers"][0]
    assert "nvidia.com/gpu" not in rollout["resources"]["limits"]


def test_a_share_of_a_gpu_goes_by_its_own_name() -> None:
    manifests = render(*CHANGED)
    limits = [
        container["resources"]["limits"]
        for _, template in pod_templates(manifests)
        for container in template["spec"]["containers"]
    ]
    assert [limit for limit in limits if "nvidia.com/gpu.shared" in limit]
    assert not [limit for limit in limits if "nvidia.com/gpu" in limit]


@pytest.mark.parametrize(
    "shares",
    [
        {"policy": (4, 0.75), "reference": (2, 0.25)},
        *further(
            {"policy": (4, 0.75)}, {"policy": (4, 0.5)}, {"policy": (8, 0.3)}, {"policy": (2, 2)}, {"policy": (3, 0)},
            {"policy": (2, 0.6), "reference": (2, 0.4)}, {"policy": (3, 0.7), "reference": (3, 0.3)},
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_whole_gpus_are_counted_as_the_plan_does(
    shares: dict[str, tuple[int, float]], placement: str, tmp_path: Path
) -> None:
    """Four ranks of 0.75 need four GPUs, because Ray places a rank on one GPU."""
    roles = {"reference": (1, 0.0)} | shares
    settings = [f"config.learner.{role}={{\"num_ranks\": {ranks}, \"gpus_per_rank\": {gpus}}}"
                for role, (ranks, gpus) in roles.items()]  # fmt: skip
    manifests = render(*(f"--set-json={setting}" for setting in settings),
                       f"--set=config.learner.placement={placement}", values="single-gpu")  # fmt: skip
    learner = run_config(manifests, tmp_path).learner
    limits = one(manifests, "Job", "-learner-")["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu", 0) == num_gpus(learner.placement, learner.needed_roles)


def test_a_worker_pod_has_the_gpus_of_its_ranks() -> None:
    """Four ranks with 0.75 of a GPU each."""
    [policy] = one(render(*CHANGED), "RayCluster")["spec"]["workerGroupSpecs"]
    assert (policy["replicas"], policy["rayStartParams"]["num-gpus"]) == (1, "4")


def test_values_without_a_gpu_fit_alongside_the_system_pods_of_a_node_with_four_cpus() -> None:
    """System pods ask for up to one and a half CPUs: kubelet reserves, DNS, network plugin, monitoring agents."""
    manifests = render(values="no-gpu")
    asked = [container["resources"]["requests"]["cpu"]
             for _, template in pod_templates(manifests) for container in template["spec"]["containers"]]  # fmt: skip
    assert len(asked) == 6, "with the pod of helm test"
    assert sum(float(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu) for cpu in asked) <= 2.5
