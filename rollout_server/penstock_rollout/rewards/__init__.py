"""Rewards: what a response is worth, by data source or by the user's own function."""
