"""How much the log-probs of two correct implementations of the same model differ."""

TYPICAL_MISMATCH_NATS = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
"""Upper end of the usual mean difference per token, by dtype."""
