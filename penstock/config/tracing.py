"""Configuration of traces."""

from __future__ import annotations

from pydantic import Field

from penstock.config.base import Config


class TracingConfig(Config):
    """Traces of prompts from submission to the version that contains them. Needs the extra [tracing]."""

    endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    """An OTLP collector over HTTP, such as http://collector:4318. Empty: nothing is traced."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the prompts that are traced."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Of one export. What cannot be exported is dropped: tracing never holds anything up."""
