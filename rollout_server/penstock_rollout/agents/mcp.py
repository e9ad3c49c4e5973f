"""The tools of MCP servers, as tools of an agent, and the connection to each server by the official client.

The client must be opened and closed by the same task, so each connection has a task that holds it. The server may end
or the network may fail: then the next call, and the one that failed, go over a new connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from penstock.cancellation import end_task
from penstock.config.rollout import McpServer
from penstock.errors import ConfigError, first_error, one_line
from penstock_rollout.agents.tools import Tool, ToolAnswer, ToolError
from penstock_rollout.rewards.scorer import bearer_headers

logger = logging.getLogger(__name__)
CLOSE_S = 10.0
"""How long a server may take to end."""
HTTP_S = 300.0
"""Timeout of a single HTTP exchange. Calls have their own deadlines."""


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

    async def open(self) -> list[McpTool]:
        """Connect, and return the tools that the settings select. Raises ConfigError."""
        where, wanted = self.place, self.settings.tools
        try:
            async with asyncio.timeout(self.settings.connect_timeout_s):
                await self._renew(self._client)
                offered = {described.name: described for described in await self._list_tools()}
        except ModuleNotFoundError as error:
            raise ConfigError(f"{where}: MCP needs a package ({error}): pip install 'penstock[agents]'") from error
        except TimeoutError as error:
            limit_s = self.settings.connect_timeout_s
            raise ConfigError(f"{where}: no answer within {limit_s:g} s; check {self._address}") from error
        except Exception as error:
            raise ConfigError(f"{where}: cannot connect to {self._address}: {_reason(error)}") from error
        if missing := sorted(set(wanted or ()) - set(offered)):
            known = ", ".join(offered) or "none"
            raise ConfigError(f"{where}.tools: the server has no tool {missing[0]!r}; it has: {known}")
        if not offered:
            raise ConfigError(f"{where}: the server offers no tools; remove it")
        return [McpTool(self, offered[name]) for name in (offered if wanted is None else wanted)]

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
                    if self._holder is None or self._holder.done():
                        await self._renew(self._client)
                    client = self._client
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
        url, new_http = str(settings.url), partial(httpx2.AsyncClient, trust_env=False)
        headers = dict(settings.headers) | bearer_headers(settings.api_key_file)
        if settings.transport == "sse":
            options = {"headers": headers, "sse_read_timeout": HTTP_S, "httpx_client_factory": new_http}
            return Client(sse_client(url, **options))
        http = await stack.enter_async_context(new_http(headers=headers, timeout=HTTP_S))
        return Client(streamable_http_client(url, http_client=http))

    async def _list_tools(self) -> list[Any]:
        tools: list[Any] = []
        cursor = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools

    @property
    def _address(self) -> str:
        return " ".join(self.settings.command) or str(self.settings.url)


def _reason(error: BaseException) -> str:
    """The first error of a group, in one line."""
    first = first_error(error)
    return one_line(first) or type(first).__name__


class McpTool(Tool):
    """One tool of a server. All samples share the server, so a server that keeps state keeps it for all of them."""

    def __init__(self, connection: McpConnection, described: Any) -> None:
        settings = connection.settings
        function = {
            "name": settings.prefix + described.name,
            "description": described.description or "",
            "parameters": described.input_schema,
        }
        super().__init__({}, {"type": "function", "function": function})
        self.timeout_s = settings.max_wait_s + settings.timeout_s
        self._connection = connection
        self._remote_name: str = described.name

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolAnswer:
        result = await self._connection.call(self._remote_name, parameters)
        text = result_text(result)
        if result.is_error:
            raise ToolError(text or f"{self.name} failed")
        return text, 0.0, {"calls": 1.0}


def result_text(result: Any) -> str:
    """The texts of a result. What cannot be shown to the model is named; a result without texts is shown as JSON."""
    parts = []
    for block in result.content:
        resource = getattr(block, "resource", None)
        text = getattr(block, "text", None) or getattr(resource, "text", None)
        parts.append(text if text is not None else f"({block.type}, which cannot be shown)")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
