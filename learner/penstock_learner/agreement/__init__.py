"""Compares the log-probs of rollout servers and learner, and puts servers that disagree into quarantine."""
