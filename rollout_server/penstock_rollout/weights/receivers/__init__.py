"""The receiving end of each weight transport, in a module of the transport's name."""
