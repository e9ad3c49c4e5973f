"""Whether the Ray cluster at `learner.ray_address` can be joined. Its head is asked without starting Ray.

For a missing or wrong token, `ray.init` takes half a minute and then only says that it could not connect.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.gpu_bundles import active_resource_groups, bundles, num_gpus
from penstock.config.learner import LearnerConfig, RoleConfig
from penstock.errors import ConfigError, Unavailable
from penstock.machine import wait_for_port

FOUND_BY_RAY = "auto"
"""The address that stands for a cluster which Ray finds on this machine."""
ANSWER_S = 10.0
"""How long the head may take to answer once it is reached."""
_PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
"""Errors that a head also gives while it starts, ends or is busy."""
_NODES = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"


@dataclass(frozen=True)
class RayNodes:
    """What the live nodes of a cluster offer."""

    num_nodes: int
    resources: Mapping[str, float]

    def __str__(self) -> str:
        gpus, cpus = (self.resources.get(name, 0) for name in ("GPU", "CPU"))
        return f"{gpus:g} GPUs and {cpus:g} CPUs on {self.num_nodes} nodes"


def find_cluster() -> str:
    """The address of the cluster that `ray.init` finds from this machine. Raises ConfigError if there is none."""
    from ray._private.services import get_ray_address_from_environment

    try:
        return str(get_ray_address_from_environment(FOUND_BY_RAY, None))
    except ConnectionError as error:
        raise ConfigError(
            "learner.ray_address is auto, but no node of a Ray cluster runs on this machine; run `ray start "
            "--address=HOST:PORT` here, with the address of the cluster's head, or set it to HOST:PORT"
        ) from error


def check_cluster(learner: LearnerConfig, roles: Mapping[str, RoleConfig], timeout_s: float) -> str:
    """Return what the cluster offers, in words. Raises an error if it cannot be joined or is too small."""
    nodes = ask_cluster(learner.ray_address, timeout_s)
    if nodes is None:
        return f"Ray at {learner.ray_address} is reachable"
    groups = active_resource_groups(learner.placement, roles)
    cpus = sum(bundle.get("CPU", 0) for group in groups for bundle in bundles(group))
    for name, needed in (("GPU", num_gpus(learner.placement, roles)), ("CPU", cpus)):
        if needed > nodes.resources.get(name, 0) + 1e-4:
            raise ConfigError(
                f"the Ray cluster at learner.ray_address {learner.ray_address} has {nodes}, but the roles need "
                f"{needed:g} {name}s; start more nodes with `ray start --address`, or lower learner.*.num_ranks"
            )
    return f"Ray at {learner.ray_address} has {nodes}"


def ask_cluster(address: str, timeout_s: float) -> RayNodes | None:
    """Wait `timeout_s` for the head to listen, and ask it for its nodes. None if it uses Ray's TLS, with which only Ray
    itself can ask. Raises Unavailable if nothing listens or answers, and ConfigError if what listens refuses this
    process."""
    import grpc  # a learner with a private Ray does without it

    host, _, port = address.rpartition(":")
    if not wait_for_port(host.strip("[]"), int(port), timeout_s):
        raise Unavailable(
            f"nothing listens at learner.ray_address {address}; start Ray there with `ray start --head "
            f"--node-ip-address={host} --port={port}`, or open the port to this machine"
        )
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return None
    token = own_token()
    metadata = [("authorization", f"Bearer {token}")] if token else []
    try:
        reply = _call(address, metadata)
        if token:
            with contextlib.suppress(grpc.RpcError):  # the head must refuse a call without a token
                _call(address, [])
                raise ConfigError(
                    f"RAY_AUTH_MODE is token, but the Ray cluster at learner.ray_address {address} asks for none, so "
                    "whoever reaches it can run code there; start all its nodes with RAY_AUTH_MODE=token and this "
                    "token, or unset RAY_AUTH_MODE here"
                )
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        if code.name in _PASSING:
            raise Unavailable(
                f"what listens at learner.ray_address {address} has not answered ({code.name}); if it is Ray's head, "
                "look at its log; otherwise give the address that `ray start --head` prints"
            ) from error
        if code is not grpc.StatusCode.UNAUTHENTICATED:
            raise ConfigError(
                f"what listens at learner.ray_address {address} does not answer as Ray's head does ({code.name}); give "
                "the address that `ray start --head` prints"
            ) from error
        raise ConfigError(
            f"the Ray cluster at learner.ray_address {address} "
            + ("refuses this process's token" if token else "wants a token, and this process has none")
            + "; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the token that its head has"
        ) from error
    # Only Ray knows its messages. Its import takes a second, so it is not needed to find the mistakes above.
    from ray.core.generated import gcs_pb2, gcs_service_pb2

    infos = gcs_service_pb2.GetAllNodeInfoReply.FromString(reply).node_info_list
    alive = [info for info in infos if info.state == gcs_pb2.GcsNodeInfo.ALIVE]
    names = {name for info in alive for name in info.resources_total}
    return RayNodes(len(alive), {name: sum(info.resources_total.get(name, 0) for info in alive) for name in names})


def own_token() -> str:
    """The token that Ray sends from this process; empty if it sends none."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return ""
    if given := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return given
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _call(address: str, metadata: list[tuple[str, str]]) -> bytes:
    import grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call: Any = channel.unary_unary(_NODES)
        reply: bytes = call(b"", timeout=ANSWER_S, metadata=metadata)
        return reply
