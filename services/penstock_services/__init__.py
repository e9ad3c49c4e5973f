"""Services around the data path: the gateway and `penstock up`."""
