"""The loggers of `learner.loggers`: where the numbers of a step go besides Prometheus."""
