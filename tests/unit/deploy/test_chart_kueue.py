"""Kueue admits, suspends and resumes a run as a whole, and the example of queues has room for it."""

from __future__ import annotations

import functools
import json
import operator
import re
from typing import Any

import pytest
import yaml

from support.chart import (
    OPTIONS,
    PLACEMENTS,
    ROOT,
    VALUES,
    Manifest,
    declare,
    further,
    needs_helm,
    of_kind,
    one,
    pod_templates,
    refusal,
    render,
)

pytestmark = needs_helm
QUEUED = "--set=kueue.queueName=runs,kueue.priorityClass=research"
OF_SEVERAL_NODES = '[{"name":"wide","nodes":2,"gpus":1,"engine":{"tensor_parallel_size":2},"replicas":3}]'
WIDE = (QUEUED, f"--set-json=rollout.pools={OF_SEVERAL_NODES}")
ONE_BY_ONE = (*OPTIONS, QUEUED, "--set=kueue.wholeRun=false")
declare((QUEUED,), WIDE, ONE_BY_ONE)
declare((QUEUED,), values="split-collocate")
LABELS = {"kueue.x-k8s.io/queue-name": "runs", "kueue.x-k8s.io/priority-class": "research"}
WORKLOADS = ("Deployment", "StatefulSet", "Job", "RayCluster", "LeaderWorkerSet")
UNITS = {"m": 1e-3, "": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def at(component: Manifest, path: str) -> Any:
    """What a path such as template.spec.workerGroupSpecs[1].template leads to."""
    steps = [int(part) if part.isdigit() else part for part in re.findall(r"\w+", path)]
    return functools.reduce(operator.getitem, steps, component)


def amount(quantity: object) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(quantity)).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


@pytest.mark.parametrize("values", [*VALUES[:2], *further(*VALUES[2:])])
def test_one_wrapper_holds_every_workload(values: str) -> None:
    plain, queued = render(values=values), render(QUEUED, values=values)
    wrapper = one(queued, "AppWrapper")
    assert LABELS.items() <= wrapper["metadata"]["labels"].items()
    components = wrapper["spec"]["components"]

    def workloads(manifests: list[Manifest]) -> dict[str, Manifest]:
        return {f"{m['kind']} {m['metadata']['name']}": m for m in manifests if m["kind"] in WORKLOADS}

    assert not workloads(queued), "nothing runs outside of the wrapper"
    assert workloads([component["template"] for component in components]) == workloads(plain)
    counted = [podset for component in components for podset in component["podSets"]]
    assert len(counted) == len([name for name, _ in pod_templates(plain) if not name.endswith("-test")]) <= 8
    for component in components:
        for podset in component["podSets"]:
            assert at(component, podset["path"])["spec"]["containers"], podset["path"]


def test_the_wrapper_counts_every_pod() -> None:
    components = one(render(*WIDE), "AppWrapper")["spec"]["components"]
    counts = {f"{c['template']['kind']} {p['path'].removeprefix('template.spec.')}": p["replicas"]
              for c in components for p in c["podSets"]}  # fmt: skip
    assert counts == {
        "StatefulSet template": 1,
        "Deployment template": 2,
        "Job template": 1,
        "RayCluster headGroupSpec.template": 1,
        "RayCluster workerGroupSpecs[0].template": 1,
        "RayCluster workerGroupSpecs[1].template": 1,
        "LeaderWorkerSet leaderWorkerTemplate.leaderTemplate": 3,
        "LeaderWorkerSet leaderWorkerTemplate.workerTemplate": 3,
    }


@pytest.mark.parametrize("values", [*VALUES[:2], *further(*VALUES[2:])])
def test_a_suspended_run_has_time_to_write_its_checkpoint(values: str) -> None:
    """The wrapper kills pods that are still there after its grace period, which is longer than that of any pod."""
    wrapper = one(render(QUEUED, values=values), "AppWrapper")
    prefix = "workload.codeflare.dev.appwrapper/"
    seconds = {name.removeprefix(prefix): int(value.removesuffix("s"))
               for name, value in wrapper["metadata"]["annotations"].items()}  # fmt: skip
    graces = [template["spec"].get("terminationGracePeriodSeconds", 30) for _, template in pod_templates([wrapper])]
    assert seconds["deletionGracePeriodDuration"] > max(graces)
    starts = [c["startupProbe"]["periodSeconds"] * c["startupProbe"]["failureThreshold"]
              for _, t in pod_templates([wrapper]) for c in t["spec"]["containers"] if "startupProbe" in c]  # fmt: skip
    assert seconds["warmupGracePeriodDuration"] > max(starts)


def test_workloads_can_be_admitted_one_by_one() -> None:
    manifests = render(*ONE_BY_ONE)
    found = [m for kind in WORKLOADS for m in of_kind(manifests, kind)]
    assert len(found) == 6 and not of_kind(manifests, "AppWrapper")
    assert all(LABELS.items() <= m["metadata"]["labels"].items() for m in found)
    assert not [name for name, t in pod_templates(manifests) if LABELS.keys() & t["metadata"]["labels"].keys()]


def test_a_run_with_too_many_kinds_of_pods_is_refused() -> None:
    pools = json.dumps([{"name": f"p{number}"} for number in range(5)])
    assert "the run has 11 kinds of pods" in refusal(QUEUED, f"--set-json=rollout.pools={pools}")


@pytest.mark.parametrize("values", PLACEMENTS)
def test_the_queues_of_the_example_admit_a_run(values: str) -> None:
    queues = list(yaml.safe_load_all((ROOT / "deploy" / "kueue" / "queues.yaml").read_text()))
    by_kind = {queue["kind"]: queue for queue in queues}
    cluster_queue = by_kind["ClusterQueue"]
    assert by_kind["LocalQueue"]["spec"]["clusterQueue"] == cluster_queue["metadata"]["name"]
    assert by_kind["LocalQueue"]["metadata"]["name"] == LABELS["kueue.x-k8s.io/queue-name"]
    assert LABELS["kueue.x-k8s.io/priority-class"] in [
        q["metadata"]["name"] for q in queues if q["kind"] == "WorkloadPriorityClass"
    ]
    [group] = cluster_queue["spec"]["resourceGroups"]
    [flavor] = group["flavors"]
    assert flavor["name"] == by_kind["ResourceFlavor"]["metadata"]["name"]
    quotas = {resource["name"]: amount(resource["nominalQuota"]) for resource in flavor["resources"]}
    assert list(quotas) == group["coveredResources"]
    needed: dict[str, float] = {}
    for component in one(render(QUEUED, values=values), "AppWrapper")["spec"]["components"]:
        for podset in component["podSets"]:
            for container in at(component, podset["path"])["spec"]["containers"]:
                resources = container["resources"]
                for name, value in (resources.get("limits", {}) | resources["requests"]).items():
                    needed[name] = needed.get(name, 0) + podset["replicas"] * amount(value)
    assert needed.keys() <= quotas.keys(), "Kueue admits no workload with a resource that the queue does not cover"
    assert all(needed[name] <= quotas[name] for name in needed), needed
