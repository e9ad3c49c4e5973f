"""Write penstock/values.schema.json: the chart's own values, and `config` with the schema of RunConfig.

    python helm/make_values_schema.py

Fields that the chart sets itself (addresses, ports, key files, the run's folder) are left out of `config`, so that a
user's value is refused and not silently replaced.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.config.run import RunConfig

SCHEMA_FILE = Path(__file__).parent / "penstock" / "values.schema.json"
DECIDED_BY_CHART = {
    "RunConfig": ("run_dir", "launcher", "demo"),
    "RedisConfig": ("url", "username", "password_file"),
    "GatewayConfig": ("host", "port", "grpc_port", "api_key_file", "keys_file", "tls_cert_file", "tls_key_file"),
    "RolloutConfig": ("host", "advertise_host", "port", "metrics_port", "num_servers"),
    "WeightsConfig": ("cluster_key_file",),
    "LearnerConfig": ("ray_address", "publish_host", "metrics_host", "metrics_port"),
}
"""Config model: its fields that values.yaml must not contain."""

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
AT_LEAST_ONE: Schema = {"type": "integer", "minimum": 1}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti|k|M|G|T)?$"}
FREE: Schema = {"type": "object"}
"""A Kubernetes object. The API server checks it."""
LIST: Schema = {"type": "array", "items": {"type": "object"}}
TEXTS: Schema = {"type": "array", "items": {"type": "string"}}
PULL_POLICY: Schema = {"enum": ["Always", "IfNotPresent", "Never"]}


def section(**properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def scheduling(**properties: Schema) -> Schema:
    return section(nodeSelector=FREE, tolerations=LIST, affinity=FREE, priorityClassName=TEXT, **properties)


def gateway() -> Schema:
    return scheduling(
        replicas=AT_LEAST_ONE,
        resources=FREE,
        service=section(type={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}, port=PORT, grpcPort=PORT),
        autoscaling=section(
            enabled=FLAG, minReplicas=AT_LEAST_ONE, maxReplicas=AT_LEAST_ONE, targetCpuPercent=AT_LEAST_ONE
        ),
        ingress=section(enabled=FLAG, className=TEXT, host=TEXT, tlsSecretName=TEXT, annotations=FREE),
        tls=section(enabled=FLAG, secretName=TEXT),
        namedKeys=FLAG,
        httpRoute=section(enabled=FLAG, parentRefs=LIST, hostnames=TEXTS),
        spreadOver=TEXTS,
    )


def rollout() -> Schema:
    return scheduling(
        replicas=COUNT,
        gpus=COUNT,
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
        env=LIST,
        spreadOver=TEXTS,
    )


def learner() -> Schema:
    worker_group = scheduling(ranksPerPod=AT_LEAST_ONE, memory=QUANTITY, shmSize=QUANTITY)
    schedulers = ["", "volcano", "yunikorn", "scheduler-plugins", "kai-scheduler", "kueue"]
    return section(
        kuberay=section(enabled=FLAG),
        gang=section(scheduler={"enum": schedulers}, queue=TEXT, priorityClassName=TEXT),
        protectFromEviction=FLAG,
        env=LIST,
        driver=scheduling(
            resources=FREE, stopSeconds=AT_LEAST_ONE, startSeconds=AT_LEAST_ONE, backoffLimit=COUNT, shmSize=QUANTITY
        ),
        head=scheduling(resources=FREE, shmSize=QUANTITY),
        rayVersion=TEXT,
        objectStoreBytes={"type": "string", "pattern": "^[0-9]+$"},
        groups=section(policy=worker_group, reference=worker_group, critic=worker_group, reward_model=worker_group),
    )


def chart_values() -> Schema:
    image = section(repository=TEXT, tag=TEXT)
    claim = {"existingClaim": TEXT, "storageClass": TEXT, "size": QUANTITY}
    return section(
        nameOverride=TEXT,
        fullnameOverride=TEXT,
        **{"global": FREE},
        images=section(
            pullPolicy=PULL_POLICY, pullSecrets=LIST, services=image, rollout=image, learner=image, redis=image
        ),
        secretName=TEXT,
        securityContext=section(runAsUser=AT_LEAST_ONE, runAsGroup=AT_LEAST_ONE, fsGroup=AT_LEAST_ONE),
        gpuResource={"type": "string", "minLength": 1},
        gateway=gateway(),
        certManager=section(enabled=FLAG, issuerRef=FREE),
        rollout=rollout(),
        learner=learner(),
        feed=scheduling(resources=FREE, backoffLimit=COUNT),
        redis=scheduling(
            enabled=FLAG, maxMemory=QUANTITY, resources=FREE, storage=section(storageClass=TEXT, size=QUANTITY)
        ),
        externalRedis=section(
            url={"type": "string", "pattern": "^(rediss?://.*)?$"}, username=TEXT, existingSecret=TEXT, key=TEXT
        ),
        storage=section(
            runs=section(**claim, accessMode={"enum": ["ReadWriteMany", "ReadWriteOnce"]}),
            models=section(existingClaim=TEXT, mountPath=TEXT),
            data=section(existingClaim=TEXT, mountPath=TEXT),
        ),
        networkPolicy=section(enabled=FLAG, metricsFrom=LIST),
        monitoring=section(
            enabled=FLAG,
            release=TEXT,
            interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
            rules=FLAG,
            dashboards=FLAG,
        ),
    )


def run_config() -> tuple[Schema, dict[str, Schema]]:
    """The schema of RunConfig without the fields that the chart sets, and the definitions that it refers to."""
    schema = RunConfig.model_json_schema(ref_template="#/$defs/{model}")
    definitions: dict[str, Schema] = schema.pop("$defs")
    for model, fields in DECIDED_BY_CHART.items():
        for field in fields:
            del (schema if model == "RunConfig" else definitions[model])["properties"][field]
    for name in ("DemoConfig", "LauncherConfig"):
        definitions.pop(name)
    return schema, definitions


def build() -> str:
    schema = chart_values()
    schema["properties"]["config"], definitions = run_config()
    whole = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the penstock chart"}
    return json.dumps(whole | schema | {"$defs": definitions}, indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(build())
