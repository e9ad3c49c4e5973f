"""The replay queue on Redis, by who calls it. `penstock/replay/redis_queue.py` puts it together."""
