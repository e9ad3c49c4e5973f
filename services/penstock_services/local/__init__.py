"""Everything on one machine: a private Redis, the parts of a config file as child processes, the demo."""
