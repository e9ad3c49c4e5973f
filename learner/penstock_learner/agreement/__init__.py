"""Do the rollout servers and the learner compute the same log-probs from the same weights? Servers that do not are put
into quarantine."""
