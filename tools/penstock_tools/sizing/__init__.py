"""Estimates of a run: memory, rates and GPUs by arithmetic; idle time and staleness by simulation."""
