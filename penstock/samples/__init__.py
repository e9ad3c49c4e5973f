"""The text of trained samples: the files that the learner writes, and reading and choosing from them."""
