"""A whole run on one machine: a private Redis, the processes of a config file as children, and the demo."""
