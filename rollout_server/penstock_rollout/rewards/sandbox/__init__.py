"""Running code that a model has written, without trusting it."""
