"""Sessions: generate calls that are recorded token by token and become training data when they get a reward."""
