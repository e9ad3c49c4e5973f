"""A file for each command of `penstock` that this package has. Each has `main(argv)`, which returns an exit code."""
