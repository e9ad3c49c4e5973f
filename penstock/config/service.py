"""Configuration of Redis, the replay queue, the gateway and the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field

from penstock.config.base import Config


class RedisConfig(Config):
    """The Redis server that holds the queue, the policy registry and the fleet."""

    url: str = ""
    """redis://, rediss:// or unix:// URL. If empty, `penstock up` starts a private server with an append-only file."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of one command."""
    retry_s: float = Field(default=60.0, ge=0)
    """Seconds for which the learner retries a call that Redis does not answer, before it ends with an error."""
    username: str = ""
    """User to log in as, if the URL does not name one. Empty means the default user."""
    password_file: Path | None = None
    """File with the password, if the URL does not contain it. None means no password."""
    tls_ca_file: Path | None = None
    """Certificate authorities to trust for a rediss:// URL. None means the system's."""
    tls_cert_file: Path | None = None
    """Client certificate, if the server requires one. None means no certificate."""
    tls_key_file: Path | None = None
    """Private key of `tls_cert_file`."""
    cluster: bool = False
    """The URL is a node of a Redis Cluster. All keys of a run are on the shard that the run's name hashes to."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        url = urlsplit(self.url)
        return (
            (self.url and url.scheme not in ("redis", "rediss", "unix"),
             f"url: must start with redis://, rediss:// or unix://, not {url.scheme or self.url!r}"),
            ((url.username or url.password) and (self.username or self.password_file),
             "url: contains credentials, and username or password_file is set too; use one of the two"),
            (self.username and self.password_file is None, "username: set password_file as well"),
            _lacks_key(self.tls_cert_file, self.tls_key_file),
            ((self.tls_ca_file or self.tls_cert_file) and self.url and url.scheme != "rediss",
             "tls_ca_file: only a rediss:// url uses TLS"),
            (self.cluster and url.scheme == "unix", "cluster: a Redis Cluster needs a redis:// or rediss:// url"),
        )  # fmt: skip


def _lacks_key(cert_file: Path | None, key_file: Path | None) -> tuple[bool, str]:
    return (cert_file is None) != (key_file is None), "tls_cert_file: set tls_key_file as well, or neither"


TLS_NAME = "penstock"
"""The name that every certificate of `tls` has. Processes have no other names in common."""


class TlsConfig(Config):
    """TLS between learner, gateway and rollout servers, and to a rediss:// URL. Each side checks the other's
    certificate, so one for all processes is enough: of the DNS name `penstock`. Renewed files count at once."""

    ca_file: Path | None = None
    """Certificate authorities that must have signed the certificate of the other side. None means no TLS."""
    cert_file: Path | None = None
    """Certificate chain of a process."""
    key_file: Path | None = None
    """Private key of `cert_file`."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        names = (self.ca_file, self.cert_file, self.key_file)
        return ((None in names and any(names), "set ca_file, cert_file and key_file, or none of them"),)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files in the order of the fields, or none of them."""
        return tuple(file for file in (self.ca_file, self.cert_file, self.key_file) if file)


class BreakerConfig(Config):
    """The circuit breaker of each rollout server. It pauses leasing while everything that the server tries fails."""

    failures: int = Field(default=32, ge=0)
    """Failed leases in a row that pause a server's leasing; the prompts get these attempts back. 0 means no breaker."""
    non_finite_failures: int = Field(default=8, ge=1)
    """The same for failures with non-finite numbers, which bad weights cause."""
    probe_s: float = Field(default=5.0, gt=0)
    """Seconds until a paused server tries one prompt, doubled with each failed probe up to 60 s. A new policy version
    is tried at once, and the first success ends the pause."""


class GroupFilterConfig(Config):
    """Which groups are trained, by rewards and lengths. Others are discarded, and other prompts admitted instead."""

    min_spread: float = Field(default=0.0, ge=0)
    """Least difference between the best and the worst reward of a group. 0 means no limit; see `dynamic_sampling`."""
    min_pass_rate: float = Field(default=0.0, ge=0, le=1)
    """Least share of a group's samples that pass. Above 0, prompts that are too hard are skipped."""
    max_pass_rate: float = Field(default=1.0, ge=0, le=1)
    """Largest share of a group's samples that pass. Below 1, prompts that are too easy are skipped."""
    pass_reward: float = 1.0
    """A sample passes with this reward or more."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens of a group's longest response. None means no limit."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        text = "min_pass_rate is above max_pass_rate, so no group would be trained"
        return ((self.min_pass_rate > self.max_pass_rate, text),)

    @property
    def looks_at_rewards(self) -> bool:
        return self.min_spread > 0 or self.min_pass_rate > 0 or self.max_pass_rate < 1


class ReplayConfig(Config):
    """The replay queue between rollout servers and learner: batch size, staleness, capacity, leases."""

    groups_per_step: int = Field(default=32, ge=1)
    """Number of groups that one step trains on."""
    max_staleness: int = Field(default=2, ge=0)
    """Largest difference, in steps, between the policy that starts a group and the policy that trains on it; prompts
    are leased only while it can be kept. 0 is synchronous training."""
    stale_policy: Literal["wait", "drop", "correct"] = "correct"
    """What happens to slow groups beyond `max_staleness`. `wait` trains in order of admission, so a slow prompt delays
    all later ones. `drop` overtakes them, and their prompts are admitted again. `correct` overtakes them and trains on
    them with off-policy correction."""
    selection: Literal["fifo", "freshest"] = "fifo"
    """Which ready groups the learner takes first: the first admitted (`fifo`) or the newest version's (`freshest`)."""
    dynamic_sampling: bool = False
    """Discard groups whose rewards are all equal, which train nothing (DAPO), and admit other prompts instead."""
    group_filter: GroupFilterConfig = GroupFilterConfig()
    capacity_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Upper bound on the bytes of ready groups; rollout servers wait while it is reached. Redis also holds the waiting
    prompts and the groups since the last checkpoint."""
    lease_ttl_s: float = Field(default=15.0, gt=0)
    """Seconds without a heartbeat after which a rollout server loses its leases."""
    max_attempts: int = Field(default=5, ge=1)
    """Failed leases after which a prompt is dead-lettered: errors, timeouts and expiries. Errors and timeouts count
    only at their server's next success, and an orderly shutdown is not a failure."""
    breaker: BreakerConfig = BreakerConfig()
    append_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a rollout server waits for room in the queue before it returns the prompt."""
    loss_window_s: float = Field(default=0.0, ge=0)
    """Seconds of writes that Redis may lose if its machine crashes: 2 with `appendfsync everysec`. New prompts are
    leased, and a new learner starts, only after this time. 0 trusts every acknowledged write."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        text = "selection: stale_policy `wait` trains in order of admission; use fifo, or another stale_policy"
        return ((self.stale_policy == "wait" and self.selection == "freshest", text),)

    @property
    def take_order(self) -> Literal["admission", "fifo", "freshest"]:
        """The order in which the learner takes groups. `admission` is `fifo` that also waits for prompts in flight."""
        return "admission" if self.stale_policy == "wait" else self.selection


class GatewayLimits(Config):
    """What one client may take from the gateway. A connection that passes a limit is closed."""

    max_header_bytes: int = Field(default=64 * 1024, ge=1024)
    """Largest headers of a REST request (else 431), and largest metadata of a gRPC call, in bytes."""
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
    """Largest number of connections to Redis for requests. Streams and scrapes have as many again."""


class SessionLimits(Config):
    """Bounds what sessions take of Redis and of the gateway's memory, and chooses their servers."""

    max_calls: int = Field(default=2000, ge=1)
    """Maximum number of calls of one session. A further one is refused."""
    max_bytes: int = Field(default=32 * 2**20, ge=1024)
    """Largest size of the recorded calls of one session in Redis; a call takes about 8 bytes for each new token."""
    max_total_bytes: int = Field(default=2**30, ge=1024)
    """Largest size of the recorded calls of all sessions of a run in Redis."""
    cache_bytes: int = Field(default=256 * 2**20, ge=0)
    """About how much memory a gateway uses to remember sessions between their calls. Others are read from Redis."""
    sticky: bool = True
    """Send the calls of a session to the server that answered its earlier ones, which has their prefix cached."""
    max_extra_calls: int = Field(default=16, ge=0)
    """A session leaves its server if that has more than this many calls above the server with the fewest."""
    task_lease_s: float = Field(default=60.0, gt=0, le=86400)
    """Seconds without a call or heartbeat after which a worker is dead, and its place of a task goes to another."""
    task_max_failures: int = Field(default=3, ge=1, le=1000)
    """Failures and lost leases after which a place of a task is abandoned. The task goes on without it."""
    max_task_places: int = Field(default=100_000, ge=1, le=10**7)
    """Largest number of places of tasks that wait for a worker. Further tasks are refused."""


class GatewayConfig(Config):
    """The gateway, which serves clients over REST and gRPC."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `keys_file` or `api_key_file`."""
    port: int = Field(default=0, ge=0, le=65535)
    """REST port. 0 takes a free port and writes it to `gateway.json` in the run's folder."""
    grpc_port: int = Field(default=0, ge=0, le=65535)
    """gRPC port. 0 takes a free port."""
    api_key_file: Path | None = None
    """File with a single API key, which has the scope admin. Clients send it as `Authorization: Bearer …`. Use
    `keys_file` for several keys or scopes. Without either, a gateway on loopback makes its own key in `gateway.key` in
    the run's folder, which commands and clients on this machine read."""
    keys_file: Path | None = None
    """File with names, scopes and hashes of API keys, by `penstock keys make`. It is read again when it changes."""
    keys_grace_s: float = Field(default=300.0, ge=0)
    """Seconds for which keys stay valid when their file cannot be read or parsed. Removed keys are invalid at once."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Names by which browsers reach the gateway, such as an ingress's; `*` allows any. Other Hosts and pages of other
    origins are refused; addresses and localhost are always allowed. Empty means no other name on loopback, else any."""
    requests_per_s: float = Field(default=0.0, ge=0)
    """Calls per second that one key may make, over REST and gRPC together. 0 means no limit."""
    burst_requests: int = Field(default=100, ge=1)
    """Number of calls that a key may make at once after it was idle."""
    tls_cert_file: Path | None = None
    """Certificate chain for REST and gRPC. None means no TLS."""
    tls_key_file: Path | None = None
    """Private key of `tls_cert_file`."""
    tls_client_ca_file: Path | None = None
    """Certificate authorities that must have signed a client's certificate. Without it, clients need none."""
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    """Largest request body in bytes. A larger one is refused with 413."""
    max_prompts_per_request: int = Field(default=1024, ge=1)
    """Maximum number of prompts in one submission."""
    generate_timeout_s: float = Field(default=300.0, gt=0)
    """Deadline of one generate call up to its last token."""
    samples_dir: Path | None = None
    """Folder of all runs with the learner's samples, if it is mounted elsewhere. None means `run_dir`."""
    session_ttl_s: float = Field(default=24 * 3600.0, gt=0)
    """Seconds for which the calls of a session are kept while no reward arrives."""
    sessions: SessionLimits = SessionLimits()
    """Limits of sessions, and how their calls are routed."""
    limits: GatewayLimits = GatewayLimits()
    """Limits on headers, times and connections."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        text = "tls_client_ca_file: needs tls_cert_file and tls_key_file"
        lacks_key = _lacks_key(self.tls_cert_file, self.tls_key_file)
        return lacks_key, (self.tls_client_ca_file and not self.tls_cert_file, text)


class DemoConfig(Config):
    """The data and sampling of `penstock demo`. Other commands ignore this section."""

    train_file: Path | None = None
    """Training dataset, submitted repeatedly until all steps are trained."""
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
    """Seconds after which the demo ends with an error."""
