"""A small server that plays a cluster's API for Helm's `lookup`: discovery, and the objects that a test stores."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KINDS = {"Secret": ("/api/v1", "secrets"), "StatefulSet": ("/apis/apps/v1", "statefulsets"),
         "Deployment": ("/apis/apps/v1", "deployments")}  # fmt: skip


class FakeApiServer(ThreadingHTTPServer):
    """Holds objects of the namespace `default`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.objects: dict[str, Any] = {}

    @classmethod
    @contextlib.contextmanager
    def started(cls) -> Iterator[FakeApiServer]:
        with cls() as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield server
            server.shutdown()

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("--dry-run=server", f"--kube-apiserver=http://127.0.0.1:{self.server_port}")

    def store(self, manifest: dict[str, Any]) -> None:
        base, plural = KINDS[manifest["kind"]]
        self.objects[f"{base}/namespaces/default/{plural}/{manifest['metadata']['name']}"] = manifest

    def find(self, path: str) -> Any:
        group = {"name": "apps", "versions": [{"groupVersion": "apps/v1", "version": "v1"}],
                 "preferredVersion": {"groupVersion": "apps/v1", "version": "v1"}}  # fmt: skip
        answers: dict[str, Any] = {
            "/version": {"major": "1", "minor": "30", "gitVersion": "v1.30.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]},
        }
        for kind, (base, plural) in KINDS.items():
            version = base.removeprefix("/apis/").removeprefix("/api/")
            resource = {"name": plural, "kind": kind, "namespaced": True, "verbs": ["get"]}
            listed = answers.setdefault(
                base, {"kind": "APIResourceList", "groupVersion": version, "resources": []}
            )  # fmt: skip
            listed["resources"].append(resource)
        return answers.get(path) or self.objects.get(path)


class _Answer(BaseHTTPRequestHandler):
    server: FakeApiServer

    def do_GET(self) -> None:  # noqa: N802
        found = self.server.find(self.path.partition("?")[0].rstrip("/"))
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self.wfile.write(json.dumps(found or missing).encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        pass
