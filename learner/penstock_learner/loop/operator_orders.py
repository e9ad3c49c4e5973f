"""The operator's orders to a learner: stop, and roll back. The learner reads them from Redis twice a second."""

from __future__ import annotations

import asyncio
import logging

from penstock.store.run_control import Orders, RunControl
from penstock_learner.loop.term import Term

logger = logging.getLogger(__name__)
POLL_S = 0.5


class OperatorOrders:
    """The orders for one term. `watch` runs beside training and sets the two events."""

    def __init__(self, control: RunControl, term: Term, stopping: asyncio.Event) -> None:
        self.control = control
        self.term = term
        self.stopping = stopping
        """Set to end the learner after the running step. A signal handler may set it too."""
        self.roll_back_ordered = asyncio.Event()
        """Set when there may be a roll back that was not followed yet."""

    async def watch(self) -> None:
        """Runs for ever. A stop order names a term: it stops the learner of that term and of earlier ones."""
        while True:
            await asyncio.sleep(POLL_S)
            orders = await self.control.orders()
            if not self.stopping.is_set() and orders.stop_term >= self.term.number:
                logger.info("the operator has ordered a stop: ending after this step, with a checkpoint")
                self.stopping.set()
            if orders.roll_backs > self.term.num_roll_backs:
                self.roll_back_ordered.set()

    async def new_roll_back(self) -> Orders | None:
        """The orders with a roll back that was not followed yet, or None."""
        self.roll_back_ordered.clear()
        orders = await self.control.orders()
        return orders if orders.roll_backs > self.term.num_roll_backs else None

    @property
    def interrupts(self) -> bool:
        """Whether an order asks training to stop waiting for a batch."""
        return self.stopping.is_set() or self.roll_back_ordered.is_set()

    async def wait_for_either(self, task: asyncio.Task[object], timeout_s: float | None) -> None:
        """Wait until the task has ended, an order has come, or `timeout_s` have passed."""
        events = [asyncio.create_task(event.wait()) for event in (self.stopping, self.roll_back_ordered)]
        await asyncio.wait({task, *events}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            event.cancel()
