"""Submits a dataset to a run, and validates the policy on held-out prompts meanwhile."""
