"""Services around the data path: the gateway."""
