"""All checks of a deployment, in the order in which they are shown."""

from __future__ import annotations

from penstock.config.run import RunConfig
from penstock.doctor.finding import Finding
from penstock.doctor.machine import check_disk, check_gpus, check_ports, check_sandbox
from penstock.doctor.redis import check_clock, check_redis
from penstock.doctor.run import check_run
from penstock.doctor.stopped import check_stopped, is_stopped
from penstock.store.redis_client import connect


async def examine(config: RunConfig) -> list[Finding]:
    """Run every check. Without an answer from Redis, the checks that need it are left out. It is no fault that the
    private Redis of a stopped run does not answer."""
    findings = [*check_ports(config), check_disk(config), *check_gpus(config), *check_sandbox(config)]
    client = connect(config.redis)
    try:
        redis_findings = await check_redis(client, config)
        if is_stopped(config) and any(finding.level == "fail" for finding in redis_findings):
            return [*check_stopped(config), *findings]
        findings += redis_findings
        if all(finding.check != "redis" or finding.level != "fail" for finding in redis_findings):
            findings += [await check_clock(client), *await check_run(client, config)]
    finally:
        await client.aclose()
    return findings
