"""The browser of the console's tests, and the folder for its screenshots."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
LAUNCH: dict[str, Any] = {"executable_path": str(CHROMIUM), "args": ["--no-sandbox"]}
needs_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason="no /usr/bin/chromium: apt-get install chromium")
SCREENSHOTS = os.environ.get("PENSTOCK_SCREENSHOTS")
"""A folder in which to keep screenshots."""
