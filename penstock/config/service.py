"""Configuration of Redis, the replay queue, the gateway and the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from penstock.config.base import Config


class RedisConfig(Config):
    url: str = ""
    """redis://, rediss:// or unix:// address. Empty: `penstock up` starts a private server with an append-only file."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of one command."""
    retry_s: float = Field(default=60.0, ge=0)
    """How long the learner repeats a call while Redis does not answer, as when it restarts, before it ends."""
    username: str = ""
    """User to log in as, where the URL names none."""
    password_file: Path | None = None
    """File with the password, where the URL holds none."""
    tls_ca_file: Path | None = None
    """Certificates to check the server of a rediss:// URL against. None: those of the system."""
    tls_cert_file: Path | None = None
    """Certificate to show the server, where it asks for one."""
    tls_key_file: Path | None = None
    """Key of `tls_cert_file`."""
    cluster: bool = False
    """The URL names a node of a Redis Cluster. A run lives on one of its shards, which its name selects."""

    @model_validator(mode="after")
    def _check(self) -> RedisConfig:
        url = urlsplit(self.url)
        if self.url and url.scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"url: {url.scheme or self.url!r} is none of redis://, rediss:// and unix://")
        if (url.username or url.password) and (self.username or self.password_file):
            raise ValueError("url: holds credentials, and so do username and password_file; give one of the two")
        if self.username and self.password_file is None:
            raise ValueError("username: set password_file as well")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file: set tls_key_file as well, or neither")
        if (self.tls_ca_file or self.tls_cert_file) and self.url and url.scheme != "rediss":
            raise ValueError("tls_ca_file: only a rediss:// url uses TLS")
        if self.cluster and url.scheme == "unix":
            raise ValueError("cluster: the nodes of a cluster have redis:// or rediss:// addresses")
        return self


class ReplayConfig(Config):
    groups_per_step: int = Field(default=32, ge=1)
    """Groups that one step trains."""
    max_staleness: int = Field(default=2, ge=0)
    """A prompt is leased only while its group can be trained at most this many steps after the policy it starts
    with. 0 is synchronous training."""
    stale_policy: Literal["wait", "drop", "correct"] = "correct"
    """What is done about groups that would be trained past the bound. `wait`: groups are trained strictly in order of
    admission, so none is ever older, and a slow prompt holds up those after it. `drop`: slow prompts are passed by;
    their groups are dropped when they arrive, and the prompts admitted again. `correct`: they are passed by, and
    their groups trained as they are, weighed off-policy."""
    selection: Literal["fifo", "freshest"] = "fifo"
    """Which ready groups the learner takes first: those admitted first, or those of the newest policy version."""
    dynamic_sampling: bool = False
    """Replace groups whose samples all have the same reward, which teach nothing (DAPO): the group is discarded, its
    prompt is finished, and another one is admitted in its place."""
    capacity_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Bytes of ready groups at which producers wait. Redis' own `maxmemory` must hold more: the waiting prompts, and
    the groups that were taken since the last checkpoint."""
    lease_ttl_s: float = Field(default=15.0, gt=0)
    """A server silent for this long loses its leases."""
    max_attempts: int = Field(default=5, ge=1)
    """Leases of one prompt before it goes to the dead letters."""
    append_timeout_s: float = Field(default=600.0, gt=0)
    """How long a producer waits for room before it gives the prompt back."""
    settle_s: float = Field(default=0.0, ge=0)
    """What Redis may lose when its machine goes down: 2 with `appendfsync everysec`. A new prompt is leased, and a new
    learner acts, only after this long. 0 trusts Redis to lose nothing that it has answered."""

    @model_validator(mode="after")
    def _check(self) -> ReplayConfig:
        if self.stale_policy == "wait" and self.selection == "freshest":
            raise ValueError(
                "selection: `wait` trains in order of admission; use fifo, or stale_policy drop or correct"
            )
        return self

    @property
    def take_order(self) -> Literal["admission", "fifo", "freshest"]:
        """`admission` is `fifo` that waits for prompts in flight."""
        return "admission" if self.stale_policy == "wait" else self.selection


class GatewayConfig(Config):
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `keys_file` or `api_key_file`."""
    port: int = Field(default=0, ge=0, le=65535)
    """REST port; 0 takes a free one and writes it to the run's folder."""
    grpc_port: int = Field(default=0, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    api_key_file: Path | None = None
    """File with one key, of the role admin, that clients send as `Authorization: Bearer …`."""
    keys_file: Path | None = None
    """File of names, roles and hashes of keys, which `penstock keys make` writes. Read again when it changes."""
    requests_per_s: float = Field(default=0.0, ge=0)
    """Calls that one key may make a second, over both protocols. 0 sets no limit."""
    burst_requests: int = Field(default=100, ge=1)
    """Calls that a key which was idle may make at once."""
    tls_cert_file: Path | None = None
    """Certificate chain to serve REST and gRPC with. None: no TLS."""
    tls_key_file: Path | None = None
    """Key of `tls_cert_file`."""
    tls_client_ca_file: Path | None = None
    """Set: clients must show a certificate that these have signed."""
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    max_prompts_per_request: int = Field(default=1024, ge=1)
    generate_timeout_s: float = Field(default=300.0, gt=0)
    """Deadline of one generate call, its last token included."""
    session_ttl_s: float = Field(default=24 * 3600.0, gt=0)
    """How long a session's calls are kept while no reward comes."""

    @model_validator(mode="after")
    def _check(self) -> GatewayConfig:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file: set tls_key_file as well, or neither")
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise ValueError("tls_client_ca_file: needs tls_cert_file and tls_key_file")
        return self


class LauncherConfig(Config):
    """What a machine carries of the runs that are created through the gateway."""

    max_runs: int = Field(default=0, ge=0)
    """Runs at once. 0: none, and `penstock up` starts no launcher."""
    launcher_id: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,128}$")
    """Names the launcher: runs go back to the one of this name when it is started again. Empty: the host's name."""


class DemoConfig(Config):
    """What `penstock demo` submits. A service run submits its own prompts and ignores this."""

    train_file: Path | None = None
    """Dataset whose prompts are submitted, again and again in seeded order, until the run has its steps."""
    heldout_file: Path | None = None
    """Dataset that is scored before the first and after the last step, never trained."""
    num_samples: int = Field(default=8, ge=1)
    """Samples of each training prompt: the size of a group."""
    heldout_samples: int = Field(default=2, ge=1)
    """Samples of each held-out problem."""
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=16, ge=1)
    deadline_s: float = Field(default=900.0, gt=0)
    """The demo gives up, with an error, when it takes longer than this."""
