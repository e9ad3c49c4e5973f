"""Rewards score responses, by data source or with the user's own function."""
