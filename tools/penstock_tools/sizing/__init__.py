"""Estimates of a run, by arithmetic: memory, rates, GPUs, idle time and staleness."""
