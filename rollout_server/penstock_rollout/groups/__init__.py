"""Makes groups from leased prompts and appends them to the queue."""
