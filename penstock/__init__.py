"""Penstock: asynchronous reinforcement-learning post-training as a service.

This package is what every process shares: contracts, plain data types, errors, configuration, the replay queue, the
client and the command line. It imports neither torch, vllm nor ray.
"""

__version__ = "0.1.0"
