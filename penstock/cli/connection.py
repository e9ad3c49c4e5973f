"""The options with which client commands find their gateway."""

from __future__ import annotations

import argparse
import contextlib
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.parser import did_you_mean, interruptible
from penstock.errors import ConfigError
from penstock.machine import accepts_connections

if TYPE_CHECKING:
    import ssl

    from penstock.client import SyncPenstockClient
    from penstock.client.address import GatewayAddress
    from penstock.config.run import RunConfig

RUNS_FOLDER = Path("runs")
PROBE_S = 1.0


def run_folder(run: str, *files: str) -> Path:
    """The folder of a run, by its name in `runs/` or its path. Raises ConfigError unless it has one of the files."""
    named = [RUNS_FOLDER / run] if Path(run).name == run != ".." else []
    folder = next((folder for folder in (*named, Path(run)) if folder.is_dir()), None)
    if folder is None:
        names = [path.name for path in RUNS_FOLDER.glob("*") if path.is_dir()]
        hint = did_you_mean(run, names) or "give its folder"
        raise ConfigError(f"there is no run {run!r} in {RUNS_FOLDER}/, and no such folder; {hint}")
    if not any((folder / file).is_file() for file in files):
        raise ConfigError(
            f"{folder} has no {' or '.join(files)}; give the folder of a run that has trained a step, and whose "
            "learner.loggers has jsonl"
        )
    return folder


def add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    for group, name, kind, metavar, text in (
        (where, "--run-dir", Path, "DIR", f"folder of a run on this machine (default: the one up in {RUNS_FOLDER}/)"),
        (where, "--url", str, "URL", "URL of a gateway, such as http://gateway:8080"),
        (parser, "--run", str, "NAME", "name of the run, to make sure that it is the right one (default: whichever)"),
        (parser, "--api-key-file", Path, "FILE", "file with the API key (default: gateway.key in the run's folder)"),
        (parser, "--tls-ca-file", Path, "FILE", "certificate authorities to trust (default: the system's)"),
        (parser, "--tls-cert-file", Path, "FILE", "client certificate together with its private key"),
    ):
        group.add_argument(name, type=kind, metavar=metavar, help=text)


def only_gateway() -> GatewayAddress:
    """Return the gateway of the only run in `runs/` that is up. Raises ConfigError if there is none, or several."""
    from penstock.client.address import GatewayAddress, is_supervised, why_no_gateway

    up = folders_up("gateway.json")
    if len(up) == 1:
        return GatewayAddress.from_run_dir(up[0])
    if up:
        raise ConfigError(f"several runs are up ({', '.join(map(str, up))}); give --run-dir with one of them")
    starting = [folder for folder in _folders("lock") if is_supervised(folder)]
    if len(starting) == 1:
        raise ConfigError(why_no_gateway(starting[0]))
    if starting:
        named = ", ".join(map(str, starting))
        raise ConfigError(f"the runs in {named} are starting or stopping, and no gateway is up; try again in a moment")
    raise ConfigError(f"no run is up in {RUNS_FOLDER}/; start one with `penstock up`, or give --run-dir or --url")


def newest_config() -> Path:
    """Return the config of the newest run in `runs/`. Runs that are up come first."""
    folders = folders_up() or _folders("config.yaml")
    if not folders:
        raise ConfigError(f"there is no run in {RUNS_FOLDER}/; give --config FILE")
    return folders[-1] / "config.yaml"


def folders_up(file: str = "config.yaml") -> list[Path]:
    """The folders in `runs/` that have the file and whose gateway answers, the one that was started last at the end."""
    from penstock.client.address import GatewayAddress

    up = []
    for folder in _folders(file):
        with contextlib.suppress(ConfigError):
            up += [folder] if _answers(GatewayAddress.from_run_dir(folder).url) else []
    return up


def _folders(file: str) -> list[Path]:
    """The folders in `runs/` that have the file, by its age, the newest at the end."""
    return [path.parent for path in sorted(RUNS_FOLDER.glob(f"*/{file}"), key=lambda path: path.stat().st_mtime)]


def _answers(url: str) -> bool:
    """Whether a gateway accepts connections. A killed gateway leaves its `gateway.json` behind."""
    parts = urllib.parse.urlsplit(url)
    return accepts_connections(str(parts.hostname), int(parts.port or 0), PROBE_S)


def _gateway_of(folder: Path) -> GatewayAddress:
    """The gateway of a run. Raises ConfigError if it is not up, or is being started again."""
    from penstock.client.address import GatewayAddress, is_supervised, read_restarting, why_no_gateway

    address = GatewayAddress.from_run_dir(folder)
    if "gateway" in read_restarting(folder) and is_supervised(folder) and not _answers(address.url):
        raise ConfigError(why_no_gateway(folder))
    return address


def load_started_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the config of a run. If it names no Redis, take the private one that `penstock up` has started for it."""
    from penstock.config.loading import load_config

    config = load_config(path, overrides)
    if config.redis.url:
        return config
    written = config.folder / "config.yaml"
    if not written.is_file():
        raise ConfigError(f"{path} has no redis.url; set it, or start the run on this machine: `penstock up {path}`")
    return config.model_copy(update={"redis": load_config(written).redis})


@contextmanager
def open_client(args: argparse.Namespace, deadline_s: float) -> Iterator[SyncPenstockClient]:
    from penstock.api_keys import read_secret
    from penstock.client import SyncPenstockClient
    from penstock.client.address import CONFIGURED_RUN

    api_key, tls = read_secret(args.api_key_file), _read_tls(args.tls_ca_file, args.tls_cert_file)
    url, run = args.url, CONFIGURED_RUN
    if not url:
        address = _gateway_of(args.run_dir) if args.run_dir else only_gateway()
        url, run, api_key = address.url, address.run, api_key or address.api_key
    client = SyncPenstockClient(url, run=args.run or run, api_key=api_key, deadline_s=deadline_s, tls=tls)
    with interruptible(f"while it waited for the gateway at {url}"), client:
        yield client


def _read_tls(ca_file: Path | None, cert_file: Path | None) -> ssl.SSLContext | None:
    if ca_file is None and cert_file is None:
        return None
    import ssl

    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-ca-file or --tls-cert-file cannot be used: {error}") from error
    return context
