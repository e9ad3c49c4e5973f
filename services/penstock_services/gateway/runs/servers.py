"""Rollout servers of a run: listing and draining them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from penstock.config.run import RunConfig
from penstock.errors import NotFound
from penstock.store.breakers import OpenBreaker
from penstock.store.fleet import Fleet, ServerRecord
from penstock.store.quarantine import Quarantine
from penstock.store.run_control import RunControl
from penstock.v1 import runs_pb2
from penstock_services.gateway.operations import AuditLog, operation


class ServerHandlers:
    def __init__(self, config: RunConfig, audit: AuditLog, fleet: Fleet, control: RunControl) -> None:
        self.config = config
        self.audit = audit
        self.fleet = fleet
        self.control = control

    @operation("read")
    async def list_servers(self, request: runs_pb2.ListServersRequest) -> runs_pb2.ListServersResponse:
        del request
        return runs_pb2.ListServersResponse(servers=await list_servers(self.fleet, self.control))

    @operation("admin")
    async def drain_server(self, request: runs_pb2.ChangeServerRequest) -> runs_pb2.Server:
        await self._server(request.server_id)
        await self.control.drain(request.server_id)
        return await self._server(request.server_id)

    @operation("admin")
    async def undrain_server(self, request: runs_pb2.ChangeServerRequest) -> runs_pb2.Server:
        await self._server(request.server_id)
        await self.control.undrain(request.server_id)
        return await self._server(request.server_id)

    async def _server(self, server_id: str) -> runs_pb2.Server:
        for server in await list_servers(self.fleet, self.control):
            if server.server_id == server_id:
                return server
        raise NotFound(f"there is no rollout server {server_id!r}; list the servers")


async def list_servers(fleet: Fleet, control: RunControl) -> list[runs_pb2.Server]:
    drained = await control.drained()
    breakers = {breaker.server_id: breaker for breaker in await control.open_breakers()}
    quarantines = await control.quarantines()
    return servers_to_proto(await fleet.servers(), drained, breakers, quarantines)


def servers_to_proto(
    servers: Sequence[ServerRecord], drained: Collection[str], breakers: Mapping[str, OpenBreaker],
    quarantines: Mapping[str, Quarantine],
) -> list[runs_pb2.Server]:  # fmt: skip
    return [
        _server_to_proto(
            record, record.server_id in drained, breakers.get(record.server_id), quarantines.get(record.server_id)
        )
        for record in servers
    ]


def _server_to_proto(
    record: ServerRecord, is_drained: bool, breaker: OpenBreaker | None, quarantine: Quarantine | None
) -> runs_pb2.Server:
    return runs_pb2.Server(
        server_id=record.server_id,
        address=record.address,
        state=record.state,
        policy_version=record.policy_version,
        heartbeat_age_ms=record.heartbeat_age_ms,
        running_groups=record.running_groups,
        engine=record.engine,
        weights_digest=record.weights_digest,
        is_drained=is_drained,
        breaker_reason=breaker.reason if breaker else "",
        breaker_failures=breaker.num_failures if breaker else 0,
        is_quarantined=quarantine is not None,
        logprob_mismatch_nats=quarantine.mismatch_nats if quarantine else 0.0,
        logprob_limit_nats=quarantine.limit_nats if quarantine else 0.0,
        num_reloads=quarantine.num_reloads if quarantine else 0,
    )
