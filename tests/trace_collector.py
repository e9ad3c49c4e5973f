"""A server that takes traces by OTLP over HTTP, as an OpenTelemetry collector does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(ThreadingHTTPServer):
    """Keeps every span that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CollectorHandler)
        self.spans: list[tuple[str, Span]] = []
        """Service and span, in the order of arrival."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            fields = {pair.key: pair.value.string_value for pair in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                self.server.spans += [(fields["service.name"], span) for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing to standard error."""


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
