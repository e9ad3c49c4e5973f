"""The roles: Ray actors that hold model shards. Each role has a class, each rank is an actor of it."""
