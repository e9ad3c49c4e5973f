"""Services around the data path: the gateway and the local launcher."""
