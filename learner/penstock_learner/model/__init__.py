"""Models over packed sequences: the policy's language model, the scalar models, attention and log-probs."""
