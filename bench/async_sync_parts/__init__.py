"""One run of async_sync.py in a process of its own, and the scores of its snapshots."""
