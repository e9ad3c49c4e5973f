"""A server's place in the fleet: its membership, the weight pushes it takes part in, and catching up."""
