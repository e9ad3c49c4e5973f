"""Feeding a dataset to a run, and validating the policy on held-out prompts beside it."""
