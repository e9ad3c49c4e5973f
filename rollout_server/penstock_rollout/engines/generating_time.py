"""How long an engine has had something to generate."""

from __future__ import annotations

import time


class GeneratingTime:
    """Counts the seconds in which at least one request was in the engine. A pause for new weights counts too, if a
    request waits for its end."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._since = 0.0
        self._ended_s = 0.0

    def begin(self) -> None:
        """A request has arrived."""
        if self._num_requests == 0:
            self._since = time.monotonic()
        self._num_requests += 1

    def end(self) -> None:
        """A request has ended, in whatever way."""
        self._num_requests -= 1
        if self._num_requests == 0:
            self._ended_s += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        return self._ended_s + (time.monotonic() - self._since if self._num_requests else 0.0)
