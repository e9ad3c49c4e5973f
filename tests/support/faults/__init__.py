"""The runs, servers and network faults of the fault matrix."""
