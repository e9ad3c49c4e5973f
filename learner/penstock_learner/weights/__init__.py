"""The learner's side of the weight push: gather the weights, stage them as buckets, send them to rollout servers."""
