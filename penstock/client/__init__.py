"""Clients of a gateway's REST API: PenstockClient for asyncio, SyncPenstockClient for scripts and notebooks, and `work`
for workers that try tasks with an agent."""

from penstock.client.client import PenstockClient
from penstock.client.sync_client import SyncPenstockClient
from penstock.client.worker import Attempt, WorkDone, work

__all__ = ["Attempt", "PenstockClient", "SyncPenstockClient", "WorkDone", "work"]
