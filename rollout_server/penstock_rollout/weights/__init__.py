"""The receiving side of a weight push: the member service, the stage, and a receiver for each transport."""
