"""The learner: algorithms, models, role workers, placements, checkpoints and the weight publisher."""
