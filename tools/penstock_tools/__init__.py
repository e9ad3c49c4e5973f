"""What no flow executes: starting a run on one machine, importing from verl, planning, offline generation, recordings,
supervised fine-tuning, exports.

This package may import every other one and is imported by none: `penstock.cli` finds its commands by name.
"""
