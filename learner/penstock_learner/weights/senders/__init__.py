"""The sending end of each weight transport."""
