"""The replay queue in memory, by who calls it. `penstock/replay/memory_queue.py` puts it together."""
