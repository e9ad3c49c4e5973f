"""The pause of vLLM for weights.py."""
