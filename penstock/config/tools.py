"""Configuration of the built-in tools that agents offer, by kind, and of MCP servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from penstock.config.base import Config


class ToolSettings(Config):
    """Settings that every built-in tool has."""

    description: str | None = Field(default=None, min_length=1)
    """What the model reads about the tool. None: the tool's own description."""


class PythonTool(ToolSettings):
    """Runs a Python program of the model in the sandbox of code rewards, and shows what it printed. The value of a last
    expression is printed too, as in an interactive interpreter. Every call is a new program: nothing is kept."""

    kind: Literal["python"]
    timeout_s: float = Field(default=10.0, gt=0)
    """Limit of one program in seconds, of wall-clock and of CPU time."""
    num_processes: int = Field(default=4, ge=1, le=1024)
    """Maximum number of programs of one rollout server that run at the same time. Further calls wait."""
    max_wait_s: float = Field(default=300.0, gt=0)
    """How long a call waits for its turn, in seconds, before it fails."""
    memory_bytes: int = Field(default=2**30, ge=2**26)
    """Maximum memory of a program in bytes: of each process (its address space), and of all its processes together."""
    file_bytes: int = Field(default=2**24, ge=0)
    """Largest file, in bytes, that a program may write to its private folder."""
    folder_bytes: int = Field(default=2**26, ge=2**16)
    """Maximum size of all files of a program together, in bytes."""
    output_bytes: int = Field(default=2**20, ge=1)
    """Maximum output of a program in bytes. A program that prints more is ended."""
    max_processes: int = Field(default=16, ge=1)
    """Maximum number of processes and threads of one program."""
    confinement: Literal["auto", "bubblewrap", "builtin"] = "auto"
    """What isolates the programs, as in the reward of kind `code`."""
    allow_unisolated: bool = False
    """Run programs even if nothing can isolate them on this machine. Code that a model has written can then reach the
    network, the disk and this user's other processes."""


class SearchTool(ToolSettings):
    """Finds passages for a query: in a local index by BM25, or through a retrieval service."""

    kind: Literal["search"]
    index: Path | None = None
    """Local index: a folder that `penstock search-index` wrote, or a file of passages (JSONL or Parquet), which is
    indexed in memory at start. None: use `url`."""
    url: str | None = Field(default=None, pattern=r"^https?://")
    """Address of a retrieval service that takes Search-R1's requests, such as `http://127.0.0.1:8000/retrieve`. None:
    use `index`."""
    top_k: int = Field(default=3, ge=1)
    """Number of passages for one query."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of one search in seconds. Connection errors, 429 and 5xx of a service are retried until then."""
    max_concurrent: int = Field(default=64, ge=1)
    """Maximum number of searches of one rollout server at the same time. Further calls wait."""
    max_wait_s: float = Field(default=300.0, gt=0)
    """How long a call waits for its turn, in seconds, before it fails."""

    @model_validator(mode="after")
    def _has_one_source(self) -> SearchTool:
        if (self.index is None) == (self.url is None):
            raise ValueError("give either `index` or `url`")
        return self


class McpServer(Config):
    """An MCP server, whose tools are offered to the model: a program that the rollout server starts, or a URL."""

    command: list[str] = []
    """Program and arguments of a server that talks over its standard input and output. Each rollout server starts one.
    Empty: use `url`."""
    url: str | None = Field(default=None, pattern=r"^https?://")
    """Address of a server that talks over HTTP, such as `http://127.0.0.1:8000/mcp`. None: use `command`."""
    transport: Literal["streamable_http", "sse"] = "streamable_http"
    """How a server with a `url` talks: Streamable HTTP, or the older HTTP with server-sent events."""
    env: dict[str, str] = {}
    """Environment variables of the program. It gets PATH, HOME and the like, and nothing else of the environment."""
    pass_env: list[str] = []
    """Names of environment variables of the rollout server that the program gets too, such as a token's."""
    folder: Path | None = None
    """Working directory of the program. None: that of the rollout server."""
    headers: dict[str, str] = {}
    """HTTP headers of requests to `url`."""
    api_key_file: Path | None = None
    """File with the key that is sent to `url` as `Authorization: Bearer …`. None: no key."""
    tools: list[str] | None = None
    """Names of the tools to offer. None: all that the server has."""
    prefix: str = ""
    """Text in front of the names that the model calls, if the tools of two servers have the same names."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of one call in seconds, with the time for a new connection if the old one broke."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """Deadline for connecting and listing the tools at start, in seconds."""
    max_concurrent: int = Field(default=64, ge=1)
    """Maximum number of calls of one rollout server at the same time. Further calls wait."""
    max_wait_s: float = Field(default=300.0, gt=0)
    """How long a call waits for its turn, in seconds, before it fails."""

    @model_validator(mode="after")
    def _has_one_address(self) -> McpServer:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give either `command` or `url`")
        return self


BuiltInTool = Annotated[PythonTool | SearchTool, Field(discriminator="kind")]
