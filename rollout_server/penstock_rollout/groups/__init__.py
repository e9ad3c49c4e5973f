"""From a leased prompt to a finished group in the replay queue."""
