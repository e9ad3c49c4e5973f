"""The Secret that the chart makes if none is given. A small server plays the cluster's API for Helm's `lookup`."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterator

import pytest

from support.chart import (
    CHANGED,
    OPTIONS,
    VALUES,
    FakeApiServer,
    Manifest,
    further,
    needs_helm,
    of_kind,
    one,
    render,
    run_helm,
)  # fmt: skip

pytestmark = needs_helm
NAME = "test-penstock-keys"


@pytest.fixture
def cluster() -> Iterator[FakeApiServer]:
    with FakeApiServer.started() as server:
        yield server


def mounted_keys(manifests: list[Manifest]) -> set[str]:
    """The keys of the Secret that any pod uses."""
    text = json.dumps(manifests)
    return {key for key in keys_of(one(manifests, "Secret")) if f'"key": "{key}"' in text}


def keys_of(secret: Manifest) -> dict[str, str]:
    return {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}


@functools.cache
def rendered_alone(values: str) -> list[Manifest]:
    """By a call of helm for these values alone."""
    return render(*OPTIONS, values=values, anew=True)


def test_one_call_renders_each_case_as_its_own_call_does() -> None:
    together, alone = (
        {
            (manifest["kind"], manifest["metadata"]["name"]): manifest
            for manifest in manifests
            if manifest["kind"] != "Secret"  # its keys are random
        }
        for manifests in (render(*OPTIONS), rendered_alone("standalone"))
    )
    assert together == alone


@pytest.mark.parametrize("values", ["standalone", *further(*VALUES[1:])])
def test_the_chart_makes_every_key_that_its_pods_mount(values: str) -> None:
    manifests = render(*OPTIONS, values=values)
    secret = one(manifests, "Secret")
    assert secret["metadata"]["name"] == NAME
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    keys = keys_of(secret)
    assert {"api-key", "cluster-key", "redis-learner-password"} <= mounted_keys(manifests)
    assert all(len(key) == 48 for key in keys.values()) and len(set(keys.values())) == len(keys)
    assert keys != keys_of(one(rendered_alone(values), "Secret")), "the keys are random"


def test_an_upgrade_keeps_the_keys_of_the_cluster_and_adds_missing_ones(cluster: FakeApiServer) -> None:
    first = one(render(*cluster.arguments, values="no-gpu", anew=True), "Secret")
    del first["data"]["ray-token"]
    cluster.store(first)
    second = keys_of(one(render(*cluster.arguments, values="no-gpu", anew=True), "Secret"))
    assert len(second.pop("ray-token")) == 48
    assert second == keys_of(first)


def test_an_upgrade_does_not_replace_the_keys_of_the_former_default(cluster: FakeApiServer) -> None:
    first = one(render(values="no-gpu"), "Secret")
    cluster.store(first | {"metadata": {"name": "penstock"}})
    result = run_helm("template", *cluster.arguments, "--is-upgrade", values="no-gpu")
    assert result.returncode != 0 and "set secretName to penstock" in result.stderr
    assert render(*cluster.arguments, "--is-upgrade", "--set=secretName=penstock", values="no-gpu", anew=True)
    cluster.store(first)
    assert render(*cluster.arguments, "--is-upgrade", values="no-gpu", anew=True), "its own Secret is there already"


def test_a_secret_of_the_operator_is_used_as_it_is() -> None:
    manifests = render(*CHANGED)
    assert of_kind(manifests, "Secret") == []
    assert NAME not in json.dumps(manifests)
