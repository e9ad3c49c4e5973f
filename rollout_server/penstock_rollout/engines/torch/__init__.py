"""A small engine on plain torch. It runs on every platform, and tests use it as a reference."""
