"""The models of learner.py, which other benchmarks train too, and the contenders that take its steps."""
