"""A worker process that leases places of tasks, lets its agents make one call each, and never gives a reward."""

from __future__ import annotations

import asyncio
import sys

import openai

from penstock.client import Attempt, PenstockClient, work


async def agent(attempt: Attempt) -> float:
    async with openai.AsyncOpenAI(
        base_url=attempt.base_url, api_key=attempt.api_key, default_headers=attempt.headers, max_retries=0
    ) as model:
        await model.chat.completions.create(model=attempt.model, messages=[{"role": "user", "content": "abc"}])
    await asyncio.sleep(3600)
    return 0.0


async def main(url: str, api_key: str, at_once: int) -> None:
    async with PenstockClient(url, api_key=api_key) as client:
        await work(client, agent, at_once=at_once, name="hanging")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
