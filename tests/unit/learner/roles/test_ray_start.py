"""The start of a private Ray on a machine that is too busy for Ray's own limit, and what is wrong with a cluster that
cannot be joined. A gRPC server stands for its head."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray.core.generated import gcs_pb2, gcs_service_pb2

from penstock.config.loading import validate
from penstock.config.run import ModelConfig, RunConfig
from penstock.errors import ConfigError, Unavailable
from penstock_learner.roles import ray_cluster
from penstock_learner.roles.ray_address import ask_cluster, check_cluster

TOO_SLOW = "The current node timed out during startup."


def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[str], address: str = "") -> list[str]:
    """Start Ray where the first starts fail with these errors. Returns the folders that were tried."""
    folders: list[str] = []

    def fail_first(config: RunConfig, roles: object, folder: str) -> None:
        folders.append(folder)
        if len(folders) <= len(errors):
            raise RuntimeError(errors[len(folders) - 1])

    monkeypatch.setattr(ray_cluster, "_start", fail_first)
    monkeypatch.setattr(ray_cluster, "ask_cluster", lambda address, timeout_s: None)
    config = RunConfig(model=ModelConfig(path=Path("m")))
    learner = config.learner.model_copy(update={"ray_address": address})
    ray_cluster._start_patiently(config.model_copy(update={"learner": learner}), {}, tmp_path)
    return folders


def test_a_private_ray_that_is_too_slow_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = start(tmp_path, monkeypatch, [TOO_SLOW, TOO_SLOW])
    assert len(folders) == len(set(folders)) == 3, "each try has a folder of its own"


@pytest.mark.parametrize(
    ("errors", "address", "message"),
    [
        ([TOO_SLOW] * 3, "", f"^Ray did not start: {TOO_SLOW}; check that the machine has free memory"),
        (["no such file"], "", "^Ray did not start: no such file"),
        ([TOO_SLOW], "10.0.0.1:6380", f"cannot be joined: {TOO_SLOW}; .*`ray start --address=10.0.0.1:6380` there$"),
        (["none runs"], "auto", "learner.ray_address auto cannot be joined: .*`ray start --address=HOST:PORT` there$"),
    ],
)
def test_a_ray_that_does_not_start_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[str], address: str, message: str
) -> None:
    with pytest.raises(Unavailable, match=message):
        start(tmp_path, monkeypatch, errors, address)


TOKEN = "7" * 64


@contextmanager
def ray_head(token: str, *resources: dict[str, float], fails: grpc.StatusCode | None = None) -> Iterator[str]:
    """What answers as the head of a cluster that wants a token, or none, and has a node with each of the resources. A
    dead node is listed too. With `fails` every answer is this error. Yields its address."""
    reply = gcs_service_pb2.GetAllNodeInfoReply()
    reply.node_info_list.add(state=gcs_pb2.GcsNodeInfo.DEAD).resources_total.update({"CPU": 64.0})
    for each in resources:
        reply.node_info_list.add(state=gcs_pb2.GcsNodeInfo.ALIVE).resources_total.update(each)

    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        if fails is not None:
            context.abort(fails, "it starts")
        if token and ("authorization", f"Bearer {token}") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: missing or incorrect")
        return bytes(reply.SerializeToString())

    handlers: dict[str, Any] = {"GetAllNodeInfo": grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the token of the user who runs the tests."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "token", "message"),
    [
        ({}, TOKEN, "wants a token, and this process has none; set RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_TOKEN": TOKEN}, TOKEN, "wants a token, and this process has none; set RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_MODE": "token"}, TOKEN, "wants a token, and this process has none; .*RAY_AUTH_TOKEN_PATH"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "8" * 64}, TOKEN, "refuses this process's token; set RAY_AUTH"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}, "", "asks for none, .*or unset RAY_AUTH_MODE here$"),
    ],
)
def test_a_token_that_does_not_fit_the_cluster_is_one_line(
    settings: dict[str, str], token: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with ray_head(token) as address, pytest.raises(ConfigError, match=message) as raised:
        ask_cluster(address, 20)
    assert address in str(raised.value) and "\n" not in str(raised.value)


def test_the_token_may_be_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    (tmp_path / ".ray").mkdir()
    for file in (tmp_path / ".ray" / "auth_token", tmp_path / "token"):
        file.write_text(f"{TOKEN}\n")
        with ray_head(TOKEN, {"CPU": 2.0, "GPU": 4.0}, {"CPU": 2.0}) as address:
            assert str(ask_cluster(address, 20)) == "4 GPUs and 4 CPUs on 2 nodes"
        file.unlink()
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))


def test_an_address_where_no_head_answers_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(Unavailable, match=f"^nothing listens at learner.ray_address {address}; .*ray start --head"):
        ask_cluster(address, 0.1)
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with pytest.raises(ConfigError, match=r"does not answer as Ray's head does \(UNIMPLEMENTED\)"):
        ask_cluster(address, 20)
    server.stop(None).wait()


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_a_head_that_does_not_answer_yet_is_not_called_a_mistake_of_the_config(code: grpc.StatusCode) -> None:
    message = rf"has not answered \({code.name}\); if it is"
    with ray_head("", fails=code) as address, pytest.raises(Unavailable, match=message):
        ask_cluster(address, 20)


def test_a_cluster_that_is_too_small_is_refused() -> None:
    with ray_head("", {"CPU": 2.0, "GPU": 1.0}) as address:
        role = {"num_ranks": 2, "gpus_per_rank": 1}
        config = validate({"model": {"path": "m"}, "learner": {"ray_address": address, "policy": role}}, "test")
        with pytest.raises(
            ConfigError, match="has 1 GPUs and 2 CPUs on 1 nodes, but the roles need 2 GPUs; start more"
        ):
            check_cluster(config.learner, {"policy": config.learner.policy}, 20)
        config = validate({"model": {"path": "m"}, "learner": {"ray_address": address}}, "test")
        found = check_cluster(config.learner, {"policy": config.learner.policy}, 20)
        assert found == f"Ray at {address} has 1 GPUs and 2 CPUs on 1 nodes"
