"""A stand-in for SGLang, checked against a schema of its requests and flags."""
