"""Everything in Redis except the replay queue: key names, the fleet, heartbeats, policies and orders."""
