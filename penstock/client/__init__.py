"""Clients of a gateway's REST API: PenstockClient for asyncio, SyncPenstockClient for scripts and notebooks."""

from penstock.client.client import PenstockClient
from penstock.client.sync_client import SyncPenstockClient

__all__ = ["PenstockClient", "SyncPenstockClient"]
