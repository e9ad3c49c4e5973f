"""Supervised fine-tuning with the learner's own model and optimizer."""
