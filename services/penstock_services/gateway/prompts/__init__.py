"""Prompts: submission, results and cancellation."""
