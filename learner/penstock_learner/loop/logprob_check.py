"""The start-up check: do the rollout engines and the learner compute the same log-probs from the same weights?

The engine's log-probs of its samples are compared with the learner's own forward pass. A trajectory is compared only if
one version sampled all of it and the learner trains it while it holds that version. If the two disagree, every ratio in
the loss is wrong from the first step, and nothing else shows it. So the first step that can be compared decides whether
the learner continues. By then its update has changed the weights in memory, but nothing was published, saved or
acknowledged.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from penstock.errors import ConfigError
from penstock.trajectory import Group

logger = logging.getLogger(__name__)
METRIC = "logprob_mismatch"


class LogProbCheck:
    """Decides once whether the learner may continue. With `max_mismatch_nats` 0 it always may."""

    def __init__(self, max_mismatch_nats: float) -> None:
        self.max_mismatch_nats = max_mismatch_nats
        self.decided = max_mismatch_nats == 0
        self.last: dict[str, float] = {}
        """The metric of the last step that had it. Every version's record gets it, because few steps have it in a run
        whose batches are all a step old."""

    def check(self, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        """Raise ConfigError if the step's mismatch exceeds the limit. Ignores a step that could not be compared."""
        mismatch = metrics.get(METRIC)
        if mismatch is None:
            return
        self.last = {METRIC: mismatch}
        if self.decided:
            return
        self.decided = True
        limit = self.max_mismatch_nats + max(map(_nucleus_nats, groups))
        if mismatch <= limit:
            logger.info("engine and learner agree on log-probs within %.2g nats", mismatch)
            return
        raise ConfigError(
            f"rollout engines and learner disagree by {mismatch:.3g} nats per token on the same weights, more than "
            f"{limit:.3g}, so every ratio of the loss is wrong; usual causes: a different model folder; the engine's "
            "dtype, quantisation or attention; a sampling option in rollout.engine.extra; "
            "correct the cause, or raise learner.max_logprob_mismatch_nats"
        )


def _nucleus_nats(group: Group) -> float:
    """The mismatch that top-p alone explains: the engine renormalises over the nucleus, which holds at least top_p."""
    return -math.log(group.sampling.top_p)
