"""The dashboards, one module each."""

from __future__ import annotations

from boards import learner, overview, reliability, rollout

BOARDS = (overview.BOARD, rollout.BOARD, learner.BOARD, reliability.BOARD)
