"""All checks of a deployment, in the order in which they are shown."""

from __future__ import annotations

from penstock.config.run import RunConfig
from penstock.doctor.finding import Finding
from penstock.doctor.machine import check_disk, check_gpus, check_ports, check_sandbox
from penstock.doctor.redis import check_clock, check_redis
from penstock.doctor.run import check_run
from penstock.store.redis_client import connect


async def examine(config: RunConfig) -> list[Finding]:
    """Run every check. Without an answer from Redis, the checks that need it are left out."""
    findings = [*check_ports(config), check_disk(config), *check_gpus(config), *check_sandbox(config)]
    client = connect(config.redis)
    try:
        redis_findings = await check_redis(client, config)
        findings += redis_findings
        if all(finding.check != "redis" or finding.level != "fail" for finding in redis_findings):
            findings += [await check_clock(client), *await check_run(client, config)]
    finally:
        await client.aclose()
    return findings
