"""Where the numbers of a step go besides Prometheus, as `learner.loggers` says."""
