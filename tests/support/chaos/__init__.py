"""The chaos run of the replay queue: its processes and its workload."""
