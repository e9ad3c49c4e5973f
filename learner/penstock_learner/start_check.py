"""`penstock learner --check`: finds the mistakes that can be found before Ray is started."""

from __future__ import annotations

from penstock.config.run import RunConfig
from penstock.start_checks import check_model, check_redis, check_roles, check_run_folder
from penstock.weights.cluster_key import ClusterKey
from penstock_learner.checkpoints.checkpoint import CheckpointStore
from penstock_learner.loggers.opening import check_loggers
from penstock_learner.model.architectures import require_causal


def check(config: RunConfig) -> str:
    """Raise ConfigError for the first mistake. Returns a phrase that says from which weights the run would start."""
    check_redis(config.redis)
    check_model(config)
    require_causal(config.model.path, "model.path")
    check_roles(config.learner)
    check_run_folder(config)
    ClusterKey.of(config).make_if_missing()
    check_loggers(config.learner.loggers)
    checkpoint = config.learner.checkpoint
    found = CheckpointStore(config.folder / "checkpoints", checkpoint.keep).candidates(checkpoint.resume)
    return f"from {found[0].name}" if found else "from the model folder"
