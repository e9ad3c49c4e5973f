"""Configuration of Redis, the replay queue, the gateway and the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from penstock.config.base import Config


class RedisConfig(Config):
    """The Redis server that holds the queue, the policy registry and the fleet."""

    url: str = ""
    """redis://, rediss:// or unix:// URL. Empty: `penstock up` starts a private server with an append-only file."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of one command, in seconds."""
    retry_s: float = Field(default=60.0, ge=0)
    """Seconds for which the learner retries a call that Redis does not answer, for example while it restarts. Then the
    learner ends with an error."""
    username: str = ""
    """User to log in as, if the URL does not name one. Empty: the default user."""
    password_file: Path | None = None
    """File with the password, if the URL does not contain it. None: no password."""
    tls_ca_file: Path | None = None
    """Certificate authorities to trust for a rediss:// URL. None: the system's."""
    tls_cert_file: Path | None = None
    """Client certificate, if the server requires one. None: no certificate."""
    tls_key_file: Path | None = None
    """Private key of `tls_cert_file`."""
    cluster: bool = False
    """The URL is a node of a Redis Cluster. All keys of a run are on the shard that the run's name hashes to."""

    @model_validator(mode="after")
    def _check(self) -> RedisConfig:
        url = urlsplit(self.url)
        if self.url and url.scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"url: must start with redis://, rediss:// or unix://, not {url.scheme or self.url!r}")
        if (url.username or url.password) and (self.username or self.password_file):
            raise ValueError("url: contains credentials, and username or password_file is set too; use one of the two")
        if self.username and self.password_file is None:
            raise ValueError("username: set password_file as well")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file: set tls_key_file as well, or neither")
        if (self.tls_ca_file or self.tls_cert_file) and self.url and url.scheme != "rediss":
            raise ValueError("tls_ca_file: only a rediss:// url uses TLS")
        if self.cluster and url.scheme == "unix":
            raise ValueError("cluster: a Redis Cluster needs a redis:// or rediss:// url")
        return self


class BreakerConfig(Config):
    """The circuit breaker of each rollout server. It pauses leasing while everything that the server tries fails."""

    failures: int = Field(default=32, ge=0)
    """Number of failed leases, without a success of the same server between them, that pauses its leasing. The prompts
    get these attempts back. 0: no breaker."""
    non_finite_failures: int = Field(default=8, ge=1)
    """The same for failures with non-finite numbers, which bad weights cause."""
    probe_s: float = Field(default=5.0, gt=0)
    """Seconds until a paused server tries one prompt. The time doubles with each failed probe, up to 60 s. A new policy
    version is tried at once. The first success ends the pause."""


class GroupFilterConfig(Config):
    """Which groups are trained, by their rewards and lengths. Others are discarded: their prompts are finished, and
    other prompts are admitted in their place."""

    min_spread: float = Field(default=0.0, ge=0)
    """Least difference between the best and the worst reward of a group. 0: no limit; see `dynamic_sampling`."""
    min_pass_rate: float = Field(default=0.0, ge=0, le=1)
    """Least share of a group's samples that pass. Above 0, prompts that are too hard are left out."""
    max_pass_rate: float = Field(default=1.0, ge=0, le=1)
    """Largest share of a group's samples that pass. Below 1, prompts that are too easy are left out."""
    pass_reward: float = 1.0
    """A sample passes with this reward or more."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens of a group's longest response. None: no limit."""

    @model_validator(mode="after")
    def _lets_something_through(self) -> Self:
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError("min_pass_rate is above max_pass_rate, so no group would be trained")
        return self

    @property
    def looks_at_rewards(self) -> bool:
        return self.min_spread > 0 or self.min_pass_rate > 0 or self.max_pass_rate < 1


class ReplayConfig(Config):
    """The replay queue between rollout servers and learner: batch size, staleness, capacity, leases."""

    groups_per_step: int = Field(default=32, ge=1)
    """Number of groups that one step trains on."""
    max_staleness: int = Field(default=2, ge=0)
    """Largest difference, in steps, between the policy that starts a group and the policy that trains on it. A prompt
    is leased only while this bound can be kept. 0 is synchronous training."""
    stale_policy: Literal["wait", "drop", "correct"] = "correct"
    """What happens to slow groups that exceed `max_staleness`. `wait` trains groups strictly in order of admission:
    none is ever too old, but a slow prompt delays all later ones. `drop` overtakes slow prompts; their groups are
    dropped when they arrive and the prompts are admitted again. `correct` overtakes slow prompts and trains on their
    groups with off-policy correction."""
    selection: Literal["fifo", "freshest"] = "fifo"
    """Which ready groups the learner takes first: `fifo` the ones admitted first, `freshest` the ones from the newest
    policy version."""
    dynamic_sampling: bool = False
    """Discard groups whose samples all have the same reward, which carry no learning signal (DAPO). Their prompts are
    finished, and other prompts are admitted in their place."""
    group_filter: GroupFilterConfig = GroupFilterConfig()
    capacity_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Upper bound on the bytes of ready groups; rollout servers wait while it is reached. Redis needs more memory than
    this: it also holds the waiting prompts and the groups taken since the last checkpoint."""
    lease_ttl_s: float = Field(default=15.0, gt=0)
    """Seconds without a heartbeat after which a rollout server loses its leases."""
    max_attempts: int = Field(default=5, ge=1)
    """Number of failed leases after which a prompt goes to the dead letters. A lease fails by an error, by a timeout,
    or because it expires. An error or a timeout counts at its server's next success: until then the server may be at
    fault (`breaker`). A server that shuts down in order gives its prompts back without a failure."""
    breaker: BreakerConfig = BreakerConfig()
    append_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a rollout server waits for room in the queue before it returns the prompt."""
    settle_s: float = Field(default=0.0, ge=0)
    """Seconds of writes that Redis may lose if its machine crashes. Set it to 2 with `appendfsync everysec`. New
    prompts are leased, and a new learner starts, only after this time. 0: trust Redis to keep every write that it has
    acknowledged."""

    @model_validator(mode="after")
    def _check(self) -> ReplayConfig:
        if self.stale_policy == "wait" and self.selection == "freshest":
            raise ValueError(
                "selection: stale_policy `wait` trains in order of admission; use fifo, or another stale_policy"
            )
        return self

    @property
    def take_order(self) -> Literal["admission", "fifo", "freshest"]:
        """The order in which the learner takes groups. `admission` is `fifo` that also waits for prompts in flight."""
        return "admission" if self.stale_policy == "wait" else self.selection


class GatewayLimits(Config):
    """What one client may take from the gateway. A connection that passes a limit is closed."""

    max_header_bytes: int = Field(default=64 * 1024, ge=1024)
    """Largest headers of a REST request, and largest metadata of a gRPC call, in bytes. Larger ones are refused with
    431."""
    header_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds in which the headers of a request must arrive, and in which a gRPC connection must be set up."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds in which the body of a REST request must arrive. A slower one is refused with 408."""
    send_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for which a REST client may read nothing while an answer waits for it."""
    keep_alive_s: float = Field(default=30.0, gt=0)
    """Seconds for which a REST connection may stay open between two requests."""
    idle_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for which a gRPC connection may stay open without a call."""
    max_connections: int = Field(default=1000, ge=1)
    """Largest number of connections of each protocol. Further REST connections are refused with 503."""
    max_connections_per_address: int = Field(default=500, ge=1)
    """Largest number of REST connections from one address. A proxy in front of the gateway is one address."""
    max_streams_per_connection: int = Field(default=256, ge=1)
    """Largest number of calls at the same time on one gRPC connection. Further calls wait in the client."""
    max_dataset_prompts: int = Field(default=100_000, ge=1)
    """Largest number of prompts in an uploaded dataset."""
    max_dataset_bytes: int = Field(default=256 * 2**20, ge=1)
    """Largest size of an uploaded Parquet dataset once it is decoded, in bytes."""
    max_redis_connections: int = Field(default=64, ge=1)
    """Largest number of connections to Redis for requests. Streams and scrapes have as many of their own."""


class SessionLimits(Config):
    """Bounds what sessions take of Redis and of the gateway's memory, and chooses their servers."""

    max_calls: int = Field(default=2000, ge=1)
    """Maximum number of calls of one session. A further one is refused."""
    max_bytes: int = Field(default=32 * 2**20, ge=1024)
    """Largest size of the recorded calls of one session in Redis. A call takes about 8 bytes for each new token of its
    prompt and its answer."""
    max_total_bytes: int = Field(default=2**30, ge=1024)
    """Largest size of the recorded calls of all sessions of a run in Redis."""
    cache_bytes: int = Field(default=256 * 2**20, ge=0)
    """About how much memory a gateway uses to remember sessions between their calls. Others are read from Redis."""
    sticky: bool = True
    """Send the calls of a session to the server that answered its earlier ones, which has their prefix cached."""
    max_extra_calls: int = Field(default=16, ge=0)
    """A session leaves its server if that has more than this many calls above the server with the fewest."""
    task_lease_s: float = Field(default=60.0, gt=0, le=86400)
    """Seconds after which a worker that sends no call of its session and no heartbeat is assumed dead, and its place of
    a task is given to another worker."""
    task_max_failures: int = Field(default=3, ge=1, le=1000)
    """Failures and lost leases after which a place of a task is given up. The task goes on without it."""
    max_task_places: int = Field(default=100_000, ge=1, le=10**7)
    """Largest number of places of tasks that wait for a worker. Further tasks are refused."""


class GatewayConfig(Config):
    """The gateway, which serves clients over REST and gRPC."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `keys_file` or `api_key_file`."""
    port: int = Field(default=0, ge=0, le=65535)
    """REST port. 0: take a free port and write it to `gateway.json` in the run's folder."""
    grpc_port: int = Field(default=0, ge=0, le=65535)
    """gRPC port. 0: take a free port."""
    api_key_file: Path | None = None
    """File with a single API key, which has the scope admin. Clients send it as `Authorization: Bearer …`. Use
    `keys_file` for several keys or scopes. Without either, a gateway on loopback makes its own key in `gateway.key` in
    the run's folder, which commands and clients on this machine read."""
    keys_file: Path | None = None
    """File with the names, scopes and hashes of API keys, written by `penstock keys make`. It is read again when it
    changes."""
    keys_grace_s: float = Field(default=300.0, ge=0)
    """Seconds for which the keys that were read before stay valid when `keys_file` or `api_key_file` becomes unreadable
    or malformed. Keys that are removed, or whose file is empty or gone, are invalid at once."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Names by which browsers reach the gateway, such as that of an ingress; `*` allows any. Requests with another Host
    are refused, and so are pages of other origins. Addresses and localhost are always allowed. Empty: no other name if
    the gateway is on loopback, else any."""
    requests_per_s: float = Field(default=0.0, ge=0)
    """Calls per second that one key may make, over REST and gRPC together. 0: no limit."""
    burst_requests: int = Field(default=100, ge=1)
    """Number of calls that a key may make at once after it was idle."""
    tls_cert_file: Path | None = None
    """Certificate chain for REST and gRPC. None: no TLS."""
    tls_key_file: Path | None = None
    """Private key of `tls_cert_file`."""
    tls_client_ca_file: Path | None = None
    """Certificate authorities that must have signed a client's certificate. None: clients need no certificate."""
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    """Largest request body in bytes. A larger one is refused with 413."""
    max_prompts_per_request: int = Field(default=1024, ge=1)
    """Maximum number of prompts in one submission."""
    generate_timeout_s: float = Field(default=300.0, gt=0)
    """Deadline, in seconds, of one generate call up to its last token."""
    samples_dir: Path | None = None
    """Folder of all runs from which trained samples are read, if the learner does not write to the gateway's `run_dir`.
    The chart mounts the learner's volume there, read-only. None: `run_dir`."""
    session_ttl_s: float = Field(default=24 * 3600.0, gt=0)
    """Seconds for which the calls of a session are kept while no reward arrives."""
    sessions: SessionLimits = SessionLimits()
    """Limits of sessions, and how their calls are routed."""
    limits: GatewayLimits = GatewayLimits()
    """Limits on headers, times and connections."""

    @model_validator(mode="after")
    def _check(self) -> GatewayConfig:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file: set tls_key_file as well, or neither")
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise ValueError("tls_client_ca_file: needs tls_cert_file and tls_key_file")
        return self


class DemoConfig(Config):
    """The data and sampling of `penstock demo`. Other commands ignore this section."""

    train_file: Path | None = None
    """Training dataset. Its prompts are submitted repeatedly, in an order given by the seed, until all steps are
    trained."""
    heldout_file: Path | None = None
    """Held-out dataset that is scored before the first step and after the last one."""
    num_samples: int = Field(default=8, ge=1)
    """Number of samples per training prompt, which is the size of a group."""
    heldout_samples: int = Field(default=2, ge=1)
    """Number of samples per held-out prompt."""
    temperature: float = Field(default=1.0, gt=0, le=100)
    """Sampling temperature."""
    max_tokens: int = Field(default=16, ge=1)
    """Maximum number of tokens in a response."""
    deadline_s: float = Field(default=900.0, gt=0)
    """Seconds after which the demo gives up with an error."""
