"""The search of `penstock plan --gpus`: candidates that fit, the fastest of them, and the plan of what was chosen."""
