"""Checkpoints: the state of a run on disk, the ledger of what it has trained on, and writing it during training."""
