"""Creating and listing runs: the two operations that concern more than one run."""

from __future__ import annotations

from penstock.config.run import RunConfig
from penstock.errors import ConfigError, Conflict
from penstock.v1 import runs_pb2
from penstock_services.gateway import validation
from penstock_services.gateway.operations import AuditLog, operation
from penstock_services.gateway.served_runs import ServedRuns


class RunCollection:
    """All runs of a gateway."""

    def __init__(self, config: RunConfig, audit: AuditLog, served: ServedRuns) -> None:
        self.config = config
        self.audit = audit
        self.served = served

    @operation("admin")
    async def create_run(self, request: runs_pb2.CreateRunRequest) -> runs_pb2.Run:
        config = validation.checked_config(request.config_json)
        if config.run == self.config.run:
            raise Conflict(f"run {config.run!r} is the gateway's own; choose another name")
        created = await self.served.created.create(config)
        return await self._describe(created.run)

    @operation("read")
    async def list_runs(self, request: runs_pb2.ListRunsRequest) -> runs_pb2.ListRunsResponse:
        del request
        runs = [await self._describe(self.config.run)]
        for created in await self.served.created.list():
            if created.run != self.config.run:
                try:
                    runs.append(await self._describe(created.run))
                except ConfigError as error:  # Another version of Penstock wrote its config.
                    runs.append(runs_pb2.Run(run=created.run, state=runs_pb2.Run.FAILED, detail=str(error)))
        return runs_pb2.ListRunsResponse(runs=runs)

    async def _describe(self, run: str) -> runs_pb2.Run:
        return await (await self.served.find(run)).lifecycle.describe()
