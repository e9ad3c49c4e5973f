"""The sending ends of the weight transports."""
