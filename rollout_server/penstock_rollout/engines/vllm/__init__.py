"""vLLM, in process."""
