"""Traces: contexts as text, parents, sampling, and the cost of disabled tracing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from penstock.config.run import TracingConfig
from penstock.tracing import OpenTelemetryTracing, Tracing, open_tracing


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> OpenTelemetryTracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return OpenTelemetryTracing(provider)


def test_a_context_that_travelled_as_text_is_the_parent(
    tracing: OpenTelemetryTracing, exporter: InMemorySpanExporter
) -> None:
    with tracing.start("submit") as submitted, tracing.start("submit"):
        pass
    with tracing.span("lease", submitted, prompt_id=7) as leased:
        pass
    tracing.record("train", leased, 100.0, 101.5, step=3)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root, lease, train = spans["submit"], spans["lease"], spans["train"]
    assert root.parent is None, "the other submission's span, current at the time, is no parent"
    assert lease.parent is not None and lease.parent.span_id == root.context.span_id
    assert train.parent is not None and train.parent.span_id == lease.context.span_id
    assert train.context.trace_id == root.context.trace_id
    assert (train.start_time, train.end_time) == (100_000_000_000, 101_500_000_000)
    assert dict(lease.attributes or {}) == {"prompt_id": 7} and dict(train.attributes or {}) == {"step": 3}


def test_a_prompt_without_a_context_is_not_traced(
    tracing: OpenTelemetryTracing, exporter: InMemorySpanExporter
) -> None:
    with tracing.span("lease", "") as leased:
        assert leased == ""
    tracing.record("train", "", 0.0, 1.0)
    assert exporter.get_finished_spans() == ()


def test_what_is_not_sampled_leaves_no_context() -> None:
    with OpenTelemetryTracing(TracerProvider(sampler=ALWAYS_OFF)).start("submit") as submitted:
        assert submitted == ""


def test_a_damaged_context_starts_a_trace_of_its_own(
    tracing: OpenTelemetryTracing, exporter: InMemorySpanExporter
) -> None:
    with tracing.start("submit", "not a context"):
        pass
    [span] = exporter.get_finished_spans()
    assert span.parent is None


def test_without_an_endpoint_nothing_is_traced_or_imported() -> None:
    assert type(open_tracing(TracingConfig(), "gateway", "run")) is Tracing
    script = (
        "import sys; from penstock.tracing import open_tracing; from penstock.config.run import TracingConfig; "
        "open_tracing(TracingConfig(), 'gateway', 'run'); "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
