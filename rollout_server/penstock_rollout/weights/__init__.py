"""The receiving end of a weight push: the member service, its stage and its receivers."""
