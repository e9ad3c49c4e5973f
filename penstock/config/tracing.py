"""Configuration of traces."""

from __future__ import annotations

from pydantic import Field

from penstock.config.base import Config


class TracingConfig(Config):
    """OpenTelemetry traces of a prompt, from its submission to the policy version that was trained on it. Needs the
    extra [tracing]."""

    endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL of an OTLP collector over HTTP, such as http://collector:4318. Empty: no tracing."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of prompts that are traced."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Timeout of one export, in seconds. Spans that cannot be exported are dropped, so tracing never blocks a
    process."""
