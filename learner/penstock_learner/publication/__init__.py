"""From gathered weights to the run's current version: the order of pushes, the servers that follow, the snapshots."""
