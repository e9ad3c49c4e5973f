"""The learner's loop: groups become batches, batches become steps, steps become versions and checkpoints."""
