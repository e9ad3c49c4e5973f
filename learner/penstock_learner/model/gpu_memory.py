"""How torch's allocator takes GPU memory. Imports no torch: it reads this when the GPU is first used."""

from __future__ import annotations

import os


def let_segments_grow() -> None:
    """Batches differ in length: segments that grow lose nothing between them, nor to rounding. What the environment
    says already stays."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
