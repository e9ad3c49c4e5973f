"""A connection to one MCP server, by the official client, and its renewal.

The client must be opened and closed by the same task, so each connection has a task that holds it. The server may end
or the network may fail: then the next call, and the one that failed, go over a new connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from penstock.cancellation import end_task
from penstock.config.tools import McpServer
from penstock.errors import ConfigError
from penstock_rollout.agents.tools import ToolError

logger = logging.getLogger(__name__)
CLOSE_S = 10.0
"""How long a server may take to end."""
HTTP_S = 300.0
"""Timeout of a single HTTP exchange. Calls have deadlines of their own."""


class ConnectionLost(Exception):
    """The connection broke before the answer came."""


class McpConnection:
    """Calls the tools of a server. Call `open` first and `close` last."""

    def __init__(self, name: str, settings: McpServer, place: str) -> None:
        self.name = name
        self.settings = settings
        self.place = place
        """Where the server is declared, for error messages."""
        self._free = asyncio.Semaphore(settings.max_concurrent)
        self._renewing = asyncio.Lock()
        self._holder: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()
        """Tells the holder to close its client."""
        self._client: Any = None

    async def open(self) -> list[Any]:
        """Connect, and return the server's tools. Raises ConfigError if that fails."""
        where = self.place
        try:
            async with asyncio.timeout(self.settings.connect_timeout_s):
                await self._renew(self._client)
                return await self._list_tools()
        except ModuleNotFoundError as error:
            raise ConfigError(f"{where}: MCP needs a package ({error}): pip install 'penstock[agents]'") from error
        except TimeoutError as error:
            limit_s = self.settings.connect_timeout_s
            raise ConfigError(f"{where}: no answer within {limit_s:g} s; check {self._address}") from error
        except Exception as error:
            raise ConfigError(f"{where}: cannot connect to {self._address}: {_reason(error)}") from error

    async def close(self) -> None:
        holder, self._holder, self._client = self._holder, None, None
        if holder is not None:
            self._leave.set()  # cancelling would cut the client's own way to end a server
            await asyncio.wait({holder}, timeout=CLOSE_S)
            await end_task(holder)

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """The result of one call. It is tried once more if the connection breaks. Raises ToolError."""
        async with self._free:
            try:
                async with asyncio.timeout(self.settings.timeout_s):
                    client = await self._connected()
                    try:
                        return await self._call(client, tool, arguments)
                    except ConnectionLost:
                        logger.warning("the connection to MCP server %s is lost; connecting again", self.name)
                        await self._renew(client)
                        return await self._call(self._client, tool, arguments)
            except TimeoutError as error:
                raise ToolError(f"{tool} did not answer within {self.settings.timeout_s:g} s") from error
            except ToolError:
                raise
            except Exception as error:
                raise ToolError(f"{tool} cannot be reached: {_reason(error)}") from error

    async def _call(self, client: Any, tool: str, arguments: dict[str, Any]) -> Any:
        """One attempt. The holder ends when the connection breaks, also while a call waits."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        holder = self._holder
        assert holder is not None
        calling = asyncio.ensure_future(client.call_tool(tool, arguments))
        try:
            await asyncio.wait({calling, holder}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise ConnectionLost
            return calling.result()
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise ConnectionLost from error
            raise ToolError(str(error)) from error
        except OSError as error:
            raise ConnectionLost from error
        finally:
            await end_task(calling)

    async def _connected(self) -> Any:
        if self._holder is None or self._holder.done():
            await self._renew(self._client)
        return self._client

    async def _renew(self, broken: Any) -> None:
        """Connect again, unless another call has replaced the `broken` client meanwhile."""
        async with self._renewing:
            if self._client is not broken:
                return
            await self.close()
            self._leave = asyncio.Event()
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(ready, self._leave), name=f"mcp {self.name}")
            try:
                self._client = await ready
            except BaseException:
                await end_task(self._holder)
                raise

    async def _hold(self, ready: asyncio.Future[Any], leave: asyncio.Event) -> None:
        """Keep a client open until `leave` is set or the connection breaks."""
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._new_client(stack))
                if not ready.done():
                    ready.set_result(client)
                await leave.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
            else:
                logger.warning("MCP server %s: %s", self.name, _reason(error))

    async def _new_client(self, stack: AsyncExitStack) -> Any:
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.sse import sse_client
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        settings = self.settings
        if settings.command:
            passed = {name: os.environ[name] for name in settings.pass_env if name in os.environ}
            program, *arguments = settings.command
            parameters = StdioServerParameters(
                command=program, args=arguments, env={**passed, **settings.env}, cwd=settings.folder
            )
            return Client(stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr))
        if settings.transport == "sse":
            return Client(sse_client(str(settings.url), headers=self._headers(), sse_read_timeout=HTTP_S))
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=self._headers(), timeout=HTTP_S))
        return Client(streamable_http_client(str(settings.url), http_client=http))

    async def _list_tools(self) -> list[Any]:
        tools: list[Any] = []
        cursor = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools

    def _headers(self) -> dict[str, str]:
        file = self.settings.api_key_file
        return dict(self.settings.headers) | ({"Authorization": f"Bearer {_key(file)}"} if file else {})

    @property
    def _address(self) -> str:
        return " ".join(self.settings.command) or str(self.settings.url)


def _key(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"api_key_file {file} cannot be read ({error.strerror}); check the path") from error


def _reason(error: BaseException) -> str:
    """The first error of a group, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split()) or type(error).__name__
