"""What no flow of a run executes: importing verl's scripts, planning, offline generation, recordings of the queue,
supervised fine-tuning, exports.

This package may import every other one and is imported by none: `penstock.cli` finds its commands by name.
"""
