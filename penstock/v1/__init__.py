"""Generated from proto/penstock/v1 by `make proto`. Do not edit."""
