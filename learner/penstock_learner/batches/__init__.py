"""Batches of whole sequences, and how they are split over ranks."""
