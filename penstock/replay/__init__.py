"""The replay queue: from submitted prompt to committed group, exactly once."""
