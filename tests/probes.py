"""Ask a process's probes, and follow its states from start to end."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any


def probe(port: int, path: str = "/readyz") -> tuple[int, dict[str, Any]] | None:
    """The status and the answer; None while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)
    except OSError:
        return None


class SeenStates(list[str]):
    """The states that a process was seen in, without repetitions."""

    def look(self, port: int) -> str:
        """Look once, and return the newest state. Only a ready process may answer with 200."""
        answer = probe(port)
        if answer is not None:
            assert (answer[0] == 200) == (answer[1]["state"] == "ready")
            if self[-1:] != [answer[1]["state"]]:
                self.append(answer[1]["state"])
        return self[-1] if self else ""
