"""The training step as a program over roles: our own steps, the steps of users, and what both are made of."""
