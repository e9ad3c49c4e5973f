"""The table of verl's keys and what becomes of each."""
