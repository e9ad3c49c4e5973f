"""pip-audit looks up the pinned packages in a database of known vulnerabilities."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

PYTHON = Path(__file__).parents[3] / "deploy" / "python"
PYPI_PROBE = "https://pypi.org/pypi/pip/24.0/json"
OSV = "https://api.osv.dev/v1/query"
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


ENGINES = ["requirements-vllm-cpu.txt", "requirements-vllm-cuda.txt"]
"""An environment has the packages of one of them. Some packages of both have different pins."""


def audit(*service: str, engine: str) -> subprocess.CompletedProcess[str]:
    pinned = [
        file for file in sorted(PYTHON.glob("requirements*.txt")) if file.name == engine or file.name not in ENGINES
    ]
    files = [word for file in pinned for word in ("-r", str(file))]
    # The files pin every package, so nothing is resolved or installed.
    words = ["--disable-pip", "--no-deps", "--strict", "--progress-spinner", "off", "--desc", "off", *service, *files]
    return subprocess.run(
        [sys.executable, "-m", "pip_audit", *words], capture_output=True, text=True, timeout=600, check=False
    )


def reachable_service() -> tuple[str, ...]:
    try:
        if "vulnerabilities" in httpx.get(PYPI_PROBE, timeout=20).text:
            return ("-s", "pypi")
        if httpx.post(OSV, json={"package": {"name": "pip", "ecosystem": "PyPI"}}, timeout=20).is_success:
            return ("-s", "osv")
    except httpx.HTTPError:
        pass
    pytest.skip("neither pypi.org's JSON API nor api.osv.dev answers: no database of vulnerabilities to ask")


@pytest.mark.parametrize("engine", ENGINES)
def test_no_pinned_package_has_a_known_vulnerability(engine: str) -> None:
    result = audit(*reachable_service(), engine=engine)
    assert result.returncode == 0, result.stdout + result.stderr


class Osv(BaseHTTPRequestHandler):
    """Knows one vulnerability, of a package that is pinned."""

    def do_POST(self) -> None:  # noqa: N802
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = query["package"]["name"] == "redis"
        affected = {
            "package": {"name": "redis", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}],
        }
        found = {"id": "TEST-1", "published": "2026-01-01T00:00:00Z", "summary": "a test", "affected": [affected]}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"vulns": [found]} if known else {}).encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def osv() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Osv) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_audit_reads_every_requirements_file_and_fails_for_a_vulnerable_package(osv: str, engine: str) -> None:
    result = audit("-s", "osv", "--osv-url", osv, engine=engine)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "TEST-1" in result.stdout and "Found 1 known vulnerability in 1 package" in result.stderr
