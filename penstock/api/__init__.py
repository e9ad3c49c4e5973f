"""What gateways and clients exchange: the records of the REST interface, and their conversion from and to protobuf."""
