"""Makes groups of leased prompts and appends them to the queue."""
