"""When a client tries a call again, and the error it raises after its last attempt.

Connection errors, 429 and 5xx are transient: the call is sent again after a pause that doubles each time, or after
the time in `Retry-After` if that is longer. Everything else is raised at once, as the class that the gateway raised.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from penstock.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    PenstockError,
    Unavailable,
    error_from_reason,
)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Upper bound of a pause that the client chooses itself. `Retry-After` may ask for a longer one."""


@dataclass(frozen=True)
class Failure:
    """Why one attempt failed. `retry_after_s` is the pause that the gateway asked for; 0 if it asked for none."""

    error: PenstockError
    is_transient: bool
    retry_after_s: float = 0.0


class Attempts:
    """Counts down the time of one call over all its attempts."""

    def __init__(self, timeout_s: float, deadline_s: float) -> None:
        self._attempt_timeout_s = timeout_s
        self._deadline = time.monotonic() + deadline_s
        self._pause_s = FIRST_PAUSE_S

    @property
    def timeout_s(self) -> float:
        """Timeout of the next attempt, which never exceeds the time that the call has left."""
        return max(0.001, min(self._attempt_timeout_s, self._deadline - time.monotonic()))

    def pause_after(self, failure: Failure) -> float:
        """Return the seconds to wait before the next attempt.

        Raises the failure's error if trying again cannot help, or if the deadline would pass during the pause."""
        pause_s = max(random.uniform(0.5, 1.0) * self._pause_s, failure.retry_after_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if not failure.is_transient or time.monotonic() + pause_s >= self._deadline:
            raise failure.error
        return pause_s


def connection_failure(url: str, error: Exception) -> Failure:
    """The failure of an attempt that got no response."""
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return Failure(ConfigError(f"{url!r} is not an http:// or https:// address"), is_transient=False)
    if isinstance(error, httpx.TimeoutException):
        return Failure(DeadlineExceeded(f"the gateway at {url} did not answer in time; try again"), is_transient=True)
    return Failure(Unavailable(f"no gateway answers at {url} ({error}); is it running?"), is_transient=True)


def response_failure(response: httpx.Response) -> Failure:
    """The failure of an attempt that was answered with an error status: a problem document, or a proxy's page."""
    is_transient = response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error
    retry_after_s = retry_after(response.headers.get("Retry-After", ""), datetime.now(UTC))
    try:
        problem = response.json()
        reason, detail, field = str(problem["reason"]), str(problem["detail"]), str(problem.get("field", ""))
    except (ValueError, KeyError, TypeError):
        error = PenstockError(f"{response.url} answered {response.status_code}; check the URL")
        return Failure(error, is_transient, retry_after_s)
    known = error_from_reason(reason, detail, field, retry_after_s)
    if known is None:  # from a newer gateway
        known = InvalidInput(field, detail.removeprefix(f"{field}: ")) if field else PenstockError(detail)
        known.reason = reason
    return Failure(known, is_transient, retry_after_s)


def retry_after(header: str, now: datetime) -> float:
    """Seconds that a `Retry-After` header asks for, given as seconds or as an HTTP date; 0 if it cannot be read."""
    if header.isascii() and header.isdigit():
        return float(header)
    try:
        at = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - now).total_seconds())
