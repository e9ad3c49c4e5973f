"""Linearizability of the replay queue: clients record calls, and a checker looks for an order that explains them."""
