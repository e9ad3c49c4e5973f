"""The model of rollout.py, durable.py and spread.py, and the two paths to an engine that rollout.py compares."""
