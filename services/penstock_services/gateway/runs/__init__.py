"""Runs: creation, state, servers, evaluations and dead letters."""
