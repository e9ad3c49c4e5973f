"""The simulated fleet of scale.py, the learner and the clients beside it, and the figures."""
