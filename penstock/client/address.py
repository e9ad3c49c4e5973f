"""Where a gateway listens, how its REST paths are spelled, and what keeps it from answering."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from penstock.api_keys import read_own_key
from penstock.errors import ConfigError
from penstock.machine import written_whole

CONFIGURED_RUN = "-"
"""Stands for the run that the gateway itself was started for."""
TOP_LEVEL = ("runs", "sessions", "tasks")
"""Resources whose paths do not name the run."""
RESTARTING = "restarting.json"
"""In a run's folder: the processes that `penstock up` is starting again."""


@dataclass(frozen=True)
class GatewayAddress:
    """A gateway's URL, the run that calls are about, and the API key to send."""

    url: str
    run: str = CONFIGURED_RUN
    api_key: str = ""

    @classmethod
    def from_run_dir(cls, folder: Path | str, api_key: str = "") -> GatewayAddress:
        """Read the address from the `gateway.json` that a gateway writes into its run's folder.

        The folder has the run's name. Without an `api_key`, the one that the gateway has made for itself is used, if it
        has and this user may read it."""
        path = Path(folder) / "gateway.json"
        try:
            fields = json.loads(path.read_text())
            host, port, scheme = fields["host"], fields["rest_port"], fields.get("scheme", "http")
        except FileNotFoundError as error:
            if is_supervised(path.parent):
                raise ConfigError(why_no_gateway(path.parent)) from error
            if not (path.parent / "config.yaml").exists():
                raise ConfigError(f"{path.parent} is not the folder of a run; check the path, or give a URL") from error
            raise ConfigError(
                f"the run in {path.parent} is not up; `penstock up` with its configuration continues it, `penstock "
                f"doctor --run-dir {path.parent}` says how it was left, and `penstock runs metrics {path.parent}` "
                "shows its steps"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); restart the gateway") from error
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  (to connect, not to listen)
        return cls(
            f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}",
            path.resolve().parent.name,
            api_key or read_own_key(Path(folder)),
        )

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def path(self, *parts: str | int, verb: str = "") -> str:
        """The path of a resource, below its run if it is not one of TOP_LEVEL, with an optional custom method.

        >>> GatewayAddress("http://gateway:8080", "math").path("prompts", 7, verb="wait")
        '/v1/runs/math/prompts/7:wait'
        """
        whole = parts if parts and parts[0] in TOP_LEVEL else ("runs", self.run, *parts)
        path = "/".join(["/v1", *(quote(str(part), safe="") for part in whole)])
        return f"{path}:{verb}" if verb else path


def is_supervised(folder: Path) -> bool:
    """Whether the `penstock up` that has locked the run's folder is alive."""
    return _supervisor_is_alive(folder) is True


def is_stopped(folder: Path) -> bool:
    """Whether the `penstock up` that ran in this folder has ended. False if the run was never started by one."""
    return _supervisor_is_alive(folder) is False


def _supervisor_is_alive(folder: Path) -> bool | None:
    """None if no supervisor has locked the folder. The lock contains its process id."""
    try:
        os.kill(int((folder / "lock").read_text()), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs as another user
        return True
    except (OSError, ValueError, OverflowError):
        return None
    return True


def write_restarting(folder: Path, ended: Mapping[str, str]) -> None:
    """Write which processes `penstock up` is starting again, each with how it ended. Without one, remove the file."""
    file = folder / RESTARTING
    if not ended:
        file.unlink(missing_ok=True)
        return
    with written_whole(file) as partial:
        partial.write_text(json.dumps(dict(ended)))


def read_restarting(folder: Path) -> dict[str, str]:
    """The processes that are being started again, each with how it ended. It counts only while the supervisor lives."""
    try:
        found = json.loads((folder / RESTARTING).read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): str(text) for name, text in found.items()} if isinstance(found, dict) else {}


def why_no_gateway(folder: Path) -> str:
    """What keeps the gateway of a run whose supervisor lives from answering."""
    ended = read_restarting(folder)
    if not ended:
        return f"the run in {folder} is starting or stopping, and its gateway is not up; try again soon"
    what = "; ".join(ended[name] for name in sorted(ended, key=lambda name: name != "gateway"))
    return f"`penstock up` is starting {', '.join(sorted(ended))} of the run in {folder} again ({what}); try again soon"
