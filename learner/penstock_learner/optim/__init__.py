"""Optimizers, clipping and learning-rate schedules."""
