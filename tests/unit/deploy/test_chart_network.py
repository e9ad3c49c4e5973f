"""Network policies, evaluated as a network plugin would: what the parts of a run need is open, and nothing else."""

from __future__ import annotations

import itertools

import pytest

from support.chart import FURTHER_OPTIONS, Manifest, declare, needs_helm, of_kind, pod_templates, render

pytestmark = needs_helm
EGRESS = "--set=networkPolicy.egress.enabled=true"
declare((*FURTHER_OPTIONS, EGRESS))
ELSEWHERE = "another namespace"
NEEDED = {
    ("gateway", "redis", 6379), ("rollout", "redis", 6379), ("learner", "redis", 6379), ("feed", "redis", 6379),
    ("gateway", "rollout", 7070), ("learner", "rollout", 7070), ("test", "gateway", 8080),
    ("policy", "rollout", 40000), ("rollout", "policy", 40000), ("learner", "head", 6379), ("policy", "head", 6379),
    ("head", "policy", 40000), ("policy", "reference", 40000), ("reference", "policy", 40000),
}  # fmt: skip
"""Connections of a run: from, to, port."""
FORBIDDEN = {
    ("gateway", "policy", 40000), ("rollout", "rollout", 40000), ("feed", "rollout", 7070), ("feed", "policy", 40000),
    ("policy", "redis", 6379), ("reference", "rollout", 40000), ("rollout", "reference", 40000),
    ("test", "redis", 6379), ("gateway", "feed", 9100), ("download", "redis", 6379),
}  # fmt: skip
OUTGOING = {("rollout", "gateway", 8080), ("redis", "learner", 9100), ("redis", "gateway", 8080)}
"""Forbidden to those who open the connection: everyone in the cluster may call a gateway, and scrape."""


def pods_of(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Pod templates by short names: the process, or the resource group of a Ray pod."""
    found = {}
    for name, template in pod_templates(manifests):
        main = template["spec"]["containers"][0]["name"]
        short = {"ray-head": "head", "ray-worker": name.rpartition("/")[2], "status": "test"}.get(main, main)
        found[short] = template
    return found


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


def matches_port(rule: Manifest, target: Manifest, port: int) -> bool:
    named = {p["name"]: p["containerPort"] for p in target["spec"]["containers"][0].get("ports", [])}
    for allowed in rule.get("ports", [{"port": port}]):
        start = named.get(allowed["port"], allowed["port"])
        if isinstance(start, int) and start <= port <= allowed.get("endPort", start):
            return True
    return False


def is_peer(peer: Manifest, other: Manifest | str) -> bool:
    if isinstance(other, str) or "namespaceSelector" in peer:
        return "namespaceSelector" in peer and "podSelector" not in peer
    return "podSelector" in peer and selects(peer["podSelector"], other["metadata"]["labels"])


def allows(
    policies: list[Manifest], kind: str, pod: Manifest, other: Manifest | str, target: Manifest, port: int
) -> bool:
    """Whether the policies of a direction let `pod` talk with `other`. Without a policy everything is open, and so it
    is to a rule without peers."""
    side = {"Ingress": "from", "Egress": "to"}[kind]
    labels = pod["metadata"]["labels"]
    mine = [
        p["spec"] for p in policies if kind in p["spec"]["policyTypes"] and selects(p["spec"]["podSelector"], labels)
    ]
    rules = [rule for spec in mine for rule in spec.get(kind.lower(), []) if matches_port(rule, target, port)]
    return not mine or any(not rule.get(side) or any(is_peer(peer, other) for peer in rule[side]) for rule in rules)


def is_open(manifests: list[Manifest], source: str, target: str, port: int) -> bool:
    policies, pods = of_kind(manifests, "NetworkPolicy"), pods_of(manifests)
    return allows(policies, "Egress", pods[source], pods[target], pods[target], port) and allows(
        policies, "Ingress", pods[target], pods[source], pods[target], port
    )


@pytest.mark.parametrize("egress", [(), (EGRESS,)], ids=["ingress", "and egress"])
def test_a_run_can_connect_where_it_needs_to_and_nowhere_else(egress: tuple[str, ...]) -> None:
    manifests = render(*FURTHER_OPTIONS, *egress)
    assert {c for c in NEEDED if not is_open(manifests, *c)} == set()
    forbidden = FORBIDDEN | OUTGOING if egress else FORBIDDEN
    assert {c for c in forbidden if is_open(manifests, *c)} == set()
    pods = pods_of(manifests)
    if egress:
        to_redis = {name for name in pods if is_open(manifests, name, "redis", 6379)}
        assert to_redis == {"gateway", "rollout", "learner", "feed"}
        for name, template in pods.items():
            policies = [p for p in of_kind(manifests, "NetworkPolicy") if "Egress" in p["spec"]["policyTypes"]
                        and selects(p["spec"]["podSelector"], template["metadata"]["labels"])]  # fmt: skip
            assert len(policies) == 1, f"{name} has {len(policies)} egress policies"


def test_an_empty_list_of_scrapers_lets_no_one_scrape() -> None:
    def scraped(*options: str) -> set[str]:
        manifests = render(*options)
        policies, pods = of_kind(manifests, "NetworkPolicy"), pods_of(manifests)
        parts = ("rollout", "learner")
        return {name for name in parts if allows(policies, "Ingress", pods[name], ELSEWHERE, pods[name], 9100)}

    assert scraped() == {"rollout", "learner"}
    assert scraped(*FURTHER_OPTIONS) == set()


def test_own_rules_and_an_external_redis_open_what_they_name() -> None:
    store = '[{"to":[{"ipBlock":{"cidr":"0.0.0.0/0"}}],"ports":[{"port":443}]}]'
    external = "--set=redis.enabled=false,externalRedis.url=rediss://redis.example.org:6380/0"
    manifests = render(EGRESS, external, f"--set-json=networkPolicy.egress.to.learner={store}")
    outgoing = [p for p in of_kind(manifests, "NetworkPolicy") if "egress" in p["spec"]]
    policies = {p["metadata"]["name"].removeprefix("test-penstock-"): p["spec"]["egress"] for p in outgoing}
    assert {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": 443}]} in policies["learner-egress"]
    assert not [rule for rule in policies["rollout-egress"] if "ipBlock" in str(rule)]
    for name in ("gateway", "rollout", "learner", "feed"):
        assert {"ports": [{"port": 6380}]} in policies[f"{name}-egress"], name
    ports = [port for rule in itertools.chain(*policies.values()) for port in rule.get("ports", [])]
    assert {port["protocol"] for port in ports if port["port"] == 53} == {"UDP", "TCP"}
