"""OpenTelemetry traces of a prompt, from submission to publication.

Tracing is off unless `tracing.endpoint` is set; OpenTelemetry is only imported then.

    submit (gateway, feed)
      └─ lease (rollout server: from the lease until the group is appended to the queue)
           ├─ generate
           ├─ reward
           ├─ queue   (until the learner reads the group)
           ├─ train   (the step)
           └─ publish (until the first version that contains it is current)

A span's context travels as W3C `traceparent` text, first with the prompt and then with the group. A prompt without one
is not traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.config.run import TracingConfig
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

CLOSE_TIMEOUT_MS = 5000
Attribute = str | int | float


class Tracing:
    """Tracing that is switched off: every method does nothing."""

    is_on = False

    @contextlib.contextmanager
    def start(self, name: str, trace_parent: str = "", **attributes: Attribute) -> Iterator[str]:
        """Start a trace, or continue the client's trace given by `trace_parent`. Yields the context for child spans,
        which is empty if the prompt is not traced."""
        yield trace_parent

    @contextlib.contextmanager
    def span(self, name: str, trace_parent: str, **attributes: Attribute) -> Iterator[str]:
        """Open a child span and yield its context. Without a parent, nothing is traced."""
        yield trace_parent

    def record(self, name: str, trace_parent: str, start_s: float, end_s: float, **attributes: Attribute) -> None:
        """Record a span that has already ended. Times are Unix timestamps in seconds."""

    def close(self) -> None:
        """Export the remaining spans."""


class OpenTelemetryTracing(Tracing):
    """Tracing with a provider that samples, batches and exports spans."""

    is_on = True

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider = provider
        self.tracer = provider.get_tracer("penstock")
        self.propagator = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def start(self, name: str, trace_parent: str = "", **attributes: Attribute) -> Iterator[str]:
        context = self._context(trace_parent)
        with self.tracer.start_as_current_span(name, context=context, attributes=attributes) as span:
            carrier: dict[str, str] = {}
            if span.get_span_context().trace_flags.sampled:
                self.propagator.inject(carrier)
            yield carrier.get("traceparent", "")

    @contextlib.contextmanager
    def span(self, name: str, trace_parent: str, **attributes: Attribute) -> Iterator[str]:
        with self.start(name, trace_parent, **attributes) if trace_parent else contextlib.nullcontext("") as below:
            yield below

    def record(self, name: str, trace_parent: str, start_s: float, end_s: float, **attributes: Attribute) -> None:
        if trace_parent:
            context, start_ns = self._context(trace_parent), int(start_s * 1e9)
            span = self.tracer.start_span(name, context=context, start_time=start_ns, attributes=attributes)
            span.end(max(start_ns, int(end_s * 1e9)))

    def close(self) -> None:
        self.provider.force_flush(CLOSE_TIMEOUT_MS)
        self.provider.shutdown()

    def _context(self, trace_parent: str) -> Context:
        """The context in `trace_parent`. The current span of this process is not used as a parent."""
        from opentelemetry.context import Context

        return self.propagator.extract({"traceparent": trace_parent}, context=Context())


def open_tracing(config: TracingConfig, component: str, run: str) -> Tracing:
    """Make the tracing that the config asks for. A background thread exports spans in batches, by OTLP over HTTP."""
    if not config.endpoint:
        return Tracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracing.endpoint is set, but OpenTelemetry is not installed ({error}); pip install 'penstock[tracing]'"
        ) from error
    resource = Resource.create({"service.name": f"penstock-{component}", "penstock.run": run})
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)), resource=resource)
    exporter = OTLPSpanExporter(endpoint=config.endpoint.rstrip("/") + "/v1/traces", timeout=config.timeout_s)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OpenTelemetryTracing(provider)
