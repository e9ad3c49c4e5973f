"""The internal port of a rollout server with certificates: who gets in, and what happens when they are renewed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.config.run import ModelConfig, RunConfig
from penstock.config.service import TlsConfig
from penstock.errors import ConfigError
from penstock.internal_calls import ClusterKey, check_certificates, open_internal_port
from penstock.v1 import weights_pb2, weights_pb2_grpc
from penstock_learner.weights.publisher import MemberCalls
from penstock_learner.weights.senders import PushTarget
from penstock_rollout.fleet.membership import make_listener
from support.certificates import make_certificate


class Member(weights_pb2_grpc.WeightMemberServiceServicer):
    async def Commit(self, request: weights_pb2.CommitRequest, context: object) -> weights_pb2.CommitResponse:  # noqa: N802
        return weights_pb2.CommitResponse()


def signed(folder: Path, name: str, authority: str) -> TlsConfig:
    """The settings of a process whose certificate is signed by an authority."""
    certificate, key = make_certificate(folder, name, authority)
    return TlsConfig(ca_file=folder / f"{authority}.crt", cert_file=certificate, key_file=key)


def config_of(folder: Path, tls: TlsConfig) -> RunConfig:
    return RunConfig(run="tls", run_dir=folder, model=ModelConfig(path=folder), tls=tls)


@contextlib.asynccontextmanager
async def listening(config: RunConfig) -> AsyncIterator[PushTarget]:
    ClusterKey.of(config).make_if_missing()
    listener = make_listener(ClusterKey.of(config))
    weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(Member(), listener)
    port = open_internal_port(listener, "127.0.0.1:0", config.tls)
    await listener.start()
    yield PushTarget("server-0", f"127.0.0.1:{port}", ("cpu",), "", ("gloo",), "")
    await listener.stop(0)


async def refusal(calls: MemberCalls, member: PushTarget) -> str:
    """What a call to the member fails with, or empty."""
    request = weights_pb2.CommitRequest(deadline_s=60)
    _, failed = await asyncio.to_thread(calls.commit, [member], request)
    return failed.get("server-0", "")


async def call_once(config: RunConfig, member: PushTarget) -> str:
    calls = MemberCalls(config)
    try:
        return await refusal(calls, member)
    finally:
        await asyncio.to_thread(calls.close)


async def test_only_callers_with_a_certificate_of_the_authority_get_in(tmp_path: Path) -> None:
    for authority in ("ca", "other"):
        make_certificate(tmp_path, authority)
    server, learner, stranger = (
        signed(tmp_path, name, authority) for name, authority in (("a", "ca"), ("b", "ca"), ("c", "other"))
    )
    liar = stranger.model_copy(update={"ca_file": server.ca_file})
    """It trusts the server, but its own certificate is of another authority."""
    async with listening(config_of(tmp_path, server)) as member:
        assert await call_once(config_of(tmp_path, learner), member) == ""
        for tls in (stranger, liar, TlsConfig()):
            assert "UNAVAILABLE" in await call_once(config_of(tmp_path, tls), member)
    async with listening(config_of(tmp_path, TlsConfig())) as member:
        assert "UNAVAILABLE" in await call_once(config_of(tmp_path, learner), member), "never without encryption"


async def test_renewed_certificates_count_without_a_restart(tmp_path: Path) -> None:
    """Both sides begin with certificates of one authority, and get those of another."""
    make_certificate(tmp_path, "old")
    make_certificate(tmp_path, "new")
    tls = signed(tmp_path, "process", "old")
    config = config_of(tmp_path, tls.model_copy(update={"ca_file": tmp_path / "ca"}))
    (tmp_path / "ca").write_bytes((tmp_path / "old.crt").read_bytes())
    calls = MemberCalls(config)
    try:
        async with listening(config) as member:
            assert await refusal(calls, member) == ""
            signed(tmp_path, "process", "new")
            (tmp_path / "ca").write_bytes((tmp_path / "new.crt").read_bytes())
            assert await refusal(calls, member) == ""
            assert await call_once(config, member) == "", "the listener has read the new files, too"
    finally:
        await asyncio.to_thread(calls.close)


def test_files_that_cannot_work_are_refused_before_the_start(tmp_path: Path) -> None:
    make_certificate(tmp_path, "ca")
    make_certificate(tmp_path, "other")
    tls = signed(tmp_path, "process", "ca")
    check_certificates(tls)
    check_certificates(TlsConfig())
    for update, reason in (
        ({"key_file": tmp_path / "none"}, "tls.key_file .*/none cannot be read: No such file"),
        ({"key_file": tmp_path / "other.key"}, "would refuse each other: KEY_VALUES_MISMATCH"),
        ({"ca_file": tmp_path / "other.crt"}, "would refuse each other: .*certificate"),
        ({"ca_file": tmp_path / "other.key"}, "would refuse each other: NO_CERTIFICATE_OR_CRL_FOUND"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_certificates(tls.model_copy(update=update))
