"""A small engine on plain torch, for every platform; the tests' oracle."""
