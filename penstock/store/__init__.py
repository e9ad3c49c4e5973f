"""Everything in Redis except the replay queue: key names, the fleet, heartbeats, policies, orders and created runs."""
