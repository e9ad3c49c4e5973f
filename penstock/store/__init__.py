"""What a run keeps in Redis beside the replay queue: the fleet, heartbeats, policies, orders and created runs."""
