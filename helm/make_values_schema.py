"""Write two files about the chart's own values and `config`, which is RunConfig:

    penstock/values.schema.json         types, which helm checks first
    penstock/files/known-values.json    the keys; templates/_unknown.tpl refuses others, and names the nearest one

    python helm/make_values_schema.py

Fields that the chart sets itself (addresses, ports, key files, the run's folder) are not part of `config`, so that a
user's value is refused and not silently replaced.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

os.environ["PENSTOCK_DESCRIBE_CONFIG"] = "1"

from penstock.config.run import RunConfig

CHART = Path(__file__).parent / "penstock"
SCHEMA_FILE, KEYS_FILE = CHART / "values.schema.json", CHART / "files" / "known-values.json"
DECIDED = "decided by the chart"
DECIDED_BY_CHART = {
    "RunConfig": ("run_dir", "cache_dir", "demo", "tls"),
    "RedisConfig": ("url", "username", "password_file"),
    "GatewayConfig": ("host", "port", "grpc_port", "api_key_file", "keys_file", "tls_cert_file", "tls_key_file"),
    "RolloutConfig": ("host", "advertise_host", "port", "metrics_port", "num_servers"),
    "WeightsConfig": ("cluster_key_file",),
    "DatasetConfig": ("metrics_host", "metrics_port"),
    "LearnerConfig": ("ray_address", "publish_host", "metrics_host", "metrics_port"),
}
"""Config model: its fields that values.yaml must not contain."""

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
AT_LEAST_ONE: Schema = {"type": "integer", "minimum": 1}
NUMBER_TEXT: Schema = {"type": "string", "pattern": r"^[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti|k|M|G|T)?$"}
FREE: Schema = {"type": "object"}
"""A Kubernetes object. The API server checks it."""
LIST: Schema = {"type": "array", "items": {"type": "object"}}
NAMED: Schema = {"type": "array", "items": {"type": "object", "required": ["name"]}}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
TEXT_FILES: Schema = {"type": "object", "propertyNames": {"pattern": "^[-._a-zA-Z0-9]+$"}, "additionalProperties": TEXT}
TEXTS: Schema = {"type": "array", "items": {"type": "string"}}
PULL_POLICY: Schema = {"enum": ["Always", "IfNotPresent", "Never"]}


def section(**properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


IMAGE = section(repository=TEXT, tag=TEXT, digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"})


POD_OPTIONS: Schema = {
    "podLabels": LABELS, "podAnnotations": LABELS, "serviceAccountName": TEXT, "runtimeClassName": TEXT,
    "schedulerName": TEXT, "priorityClassName": TEXT, "nodeSelector": LABELS, "tolerations": LIST, "affinity": FREE,
    "topologySpreadConstraints": LIST, "env": LIST, "envFrom": LIST, "extraVolumes": LIST, "extraVolumeMounts": LIST,
    "initContainers": NAMED, "sidecars": NAMED, "resourceClaims": NAMED,
    "extraResources": section(requests=FREE, limits=FREE), "podSpec": FREE,
}  # fmt: skip
"""What every workload takes. templates/_workload.tpl applies them."""


def workload(**properties: Schema) -> Schema:
    return section(**POD_OPTIONS, **properties)


def gateway() -> Schema:
    return workload(
        replicas=AT_LEAST_ONE,
        resources=FREE,
        service=section(
            type={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}, port=PORT, grpcPort=PORT, annotations=FREE
        ),
        autoscaling=section(
            enabled=FLAG, minReplicas=AT_LEAST_ONE, maxReplicas=AT_LEAST_ONE, targetCpuPercent=AT_LEAST_ONE
        ),
        ingress=section(enabled=FLAG, className=TEXT, host=TEXT, tlsSecretName=TEXT, annotations=FREE),
        tls=section(enabled=FLAG, secretName=TEXT),
        namedKeys=FLAG,
        httpRoute=section(enabled=FLAG, parentRefs=LIST, hostnames=TEXTS, caConfigMap=TEXT),
        spreadOver=TEXTS,
    )


def servers(**properties: Schema) -> Schema:
    """Settings of rollout servers: those of `rollout`, and those of each of its pools."""
    return workload(
        replicas=COUNT,
        gpus=COUNT,
        nodes=AT_LEAST_ONE,
        gpuResource=TEXT,
        resources=FREE,
        shmSize=QUANTITY,
        drainSeconds=AT_LEAST_ONE,
        maxUnavailable={"anyOf": [AT_LEAST_ONE, {"type": "string", "pattern": "^[1-9][0-9]?%$"}]},
        autoscaling=section(
            enabled=FLAG,
            minReplicas=COUNT,
            maxReplicas=AT_LEAST_ONE,
            prometheusUrl={"type": "string", "pattern": "^(https?://.*)?$"},
            groupsPerServer={"anyOf": [AT_LEAST_ONE, {"type": "null"}]},
            pollingSeconds=AT_LEAST_ONE,
            cooldownSeconds=COUNT,
        ),
        spreadOver=TEXTS,
        **properties,
    )


def rollout() -> Schema:
    name: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,28}[a-z0-9])?$"}
    pool = servers(
        name=name, spot=FLAG, image=IMAGE, engine={"$ref": "#/$defs/EngineConfig"}, maxConcurrentGroups=AT_LEAST_ONE
    )
    return servers(pools={"type": "array", "items": pool | {"required": ["name"]}})


def learner() -> Schema:
    worker_group = workload(ranksPerPod=AT_LEAST_ONE, memory=QUANTITY, shmSize=QUANTITY)
    schedulers = ["", "volcano", "yunikorn", "scheduler-plugins", "kai-scheduler", "kueue"]
    return section(
        kuberay=section(enabled=FLAG),
        gang=section(scheduler={"enum": schedulers}, queue=TEXT, priorityClassName=TEXT),
        protectFromEviction=FLAG,
        env=LIST,
        driver=workload(
            resources=FREE, stopSeconds=AT_LEAST_ONE, startSeconds=AT_LEAST_ONE, backoffLimit=COUNT, shmSize=QUANTITY
        ),
        head=workload(resources=FREE, shmSize=QUANTITY),
        rayVersion=TEXT,
        objectStoreBytes={"type": "string", "pattern": "^[0-9]+$"},
        groups=section(policy=worker_group, reference=worker_group, critic=worker_group, reward_model=worker_group),
    )


def network_policy() -> Schema:
    rules = section(gateway=LIST, rollout=LIST, learner=LIST, feed=LIST, modelDownload=LIST)
    return section(enabled=FLAG, metricsFrom=LIST, egress=section(enabled=FLAG, dns=LIST, to=rules))


def chart_values() -> Schema:
    claim = {"existingClaim": TEXT, "storageClass": TEXT, "size": QUANTITY}
    return section(
        nameOverride=TEXT,
        fullnameOverride=TEXT,
        **{"global": FREE},
        images=section(
            registry=TEXT,
            pullPolicy=PULL_POLICY,
            pullSecrets=LIST,
            services=IMAGE,
            rollout=IMAGE,
            learner=IMAGE,
            redis=IMAGE,
        ),
        secretName=TEXT,
        secretProviderClass=TEXT,
        serviceAccount=section(create=FLAG, name=TEXT, annotations=LABELS),
        huggingFace=section(tokenSecret=TEXT, tokenKey=TEXT),
        podDefaults=section(**POD_OPTIONS),
        kueue=section(queueName=TEXT, priorityClass=TEXT, wholeRun=FLAG, maxPodSets=AT_LEAST_ONE),
        securityContext=section(runAsUser=AT_LEAST_ONE, runAsGroup=AT_LEAST_ONE, fsGroup=AT_LEAST_ONE),
        gpuResource={"type": "string", "minLength": 1},
        gateway=gateway(),
        tls=section(enabled=FLAG),
        certManager=section(enabled=FLAG, issuerRef=FREE, publicNamesOnly=FLAG),
        rollout=rollout(),
        learner=learner(),
        feed=workload(resources=FREE, backoffLimit=COUNT),
        redis=workload(
            enabled=FLAG, maxMemory=QUANTITY, resources=FREE, storage=section(storageClass=TEXT, size=QUANTITY)
        ),
        externalRedis=section(
            url={"type": "string", "pattern": "^(rediss?://.*)?$"}, username=TEXT, existingSecret=TEXT, key=TEXT
        ),
        storage=section(
            runs=section(**claim, accessMode={"enum": ["ReadWriteMany", "ReadWriteOnce"]}),
            models=section(existingClaim=TEXT, mountPath=TEXT),
            data=section(existingClaim=TEXT, mountPath=TEXT, source=TEXT, envFrom=LIST, size=QUANTITY),
            cache=section(existingClaim=TEXT, mountPath=TEXT),
        ),
        files=TEXT_FILES,
        modelDownload=workload(
            **claim,
            source=TEXT,
            timeoutSeconds=AT_LEAST_ONE,
            into={"enum": ["claim", "pod"]},
            accessMode={"enum": ["ReadWriteMany", "ReadWriteOnce"]},
            resources=FREE,
            backoffLimit=COUNT,
        ),
        networkPolicy=network_policy(),
        monitoring=section(
            enabled=FLAG,
            release=TEXT,
            interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
            rules=FLAG,
            runbookUrl=TEXT,
            dashboards=FLAG,
        ),
    )


def run_config() -> tuple[Schema, dict[str, Schema]]:
    """The schema of RunConfig, and the definitions that it refers to. Fields that the chart sets are DECIDED."""
    schema = RunConfig.model_json_schema(ref_template="#/$defs/{model}")
    definitions: dict[str, Schema] = schema.pop("$defs")
    for model, fields in DECIDED_BY_CHART.items():
        for field in fields:
            (schema if model == "RunConfig" else definitions[model])["properties"][field] = {"const": DECIDED}
    definitions.pop("DemoConfig")
    return take_number_texts(schema), {name: take_number_texts(model) for name, model in definitions.items()}


def take_number_texts(schema: Any) -> Any:
    """Allow texts such as `0.5` and `2e-4` for numbers: `helm --set` makes texts of all numbers that are not integers.
    The processes read them as numbers, and check their bounds."""
    if isinstance(schema, list):
        return [take_number_texts(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "number":
        about = {key: schema[key] for key in ("title", "description", "default") if key in schema}
        bounds = {key: value for key, value in schema.items() if key not in about}
        return about | {"anyOf": [bounds, NUMBER_TEXT]}
    return {key: take_number_texts(value) for key, value in schema.items()}


def known_keys(schema: Schema, definitions: dict[str, Schema]) -> Any:
    """The keys of a value and of the values in it. `*` stands for any key, `[]` for the items of a list. None if
    the schema takes any key, or chooses between several sections and so checks the keys itself."""
    if schema.get("const") == DECIDED:
        return DECIDED
    if "$ref" in schema:
        return known_keys(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if found := [keys for part in schema.get("anyOf", ()) if (keys := known_keys(part, definitions)) is not None]:
        [keys] = found
        return keys
    if "items" in schema:
        keys = known_keys(schema["items"], definitions)
        return keys and {"[]": keys}
    for value in (schema.get("additionalProperties"), *schema.get("patternProperties", {}).values()):
        if isinstance(value, dict):
            keys = known_keys(value, definitions)
            return keys and {"*": keys}
    if schema.get("additionalProperties") is False:
        return {key: known_keys(value, definitions) for key, value in schema.get("properties", {}).items()}
    return None


def of_types(schema: Any, chosen: set[str]) -> Any:
    """A schema that takes every key, as the template refuses unknown ones, except in the `chosen` definitions."""
    if isinstance(schema, list):
        return [of_types(part, chosen) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "additionalProperties" or value is not False}
    properties = {key: value for key, value in kept.get("properties", {}).items() if value.get("const") != DECIDED}
    made = {
        key: list_keys(value) if key in chosen else of_types(value, chosen)
        for key, value in kept.items()
        if key != "properties"
    }
    return made | ({"properties": of_types(properties, chosen)} if "properties" in kept else {})


def list_keys(schema: Schema) -> Schema:
    """Let the error about an unknown key list the keys that its section has."""
    return schema | {"propertyNames": {"enum": sorted(schema["properties"])}}


def build() -> dict[Path, str]:
    """The files and their texts."""
    schema = chart_values()
    schema["properties"]["config"], definitions = run_config()
    keys = known_keys(schema, definitions)
    chosen = {
        name.rpartition("/")[2]
        for name in re.findall(r'"oneOf": \[(.+?)\]', json.dumps(definitions))
        for name in re.findall(r"#/\$defs/\w+", name)
    }
    whole = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the penstock chart"}
    types = of_types(whole | schema | {"$defs": definitions}, chosen)
    return {SCHEMA_FILE: json.dumps(types, indent=1) + "\n", KEYS_FILE: json.dumps(keys, indent=1) + "\n"}


if __name__ == "__main__":
    for file, text in build().items():
        file.write_text(text)
