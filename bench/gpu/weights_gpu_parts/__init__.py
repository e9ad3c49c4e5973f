"""Pushes that weights.py measures: to an engine, between ranks, and against a copy on the GPU."""
