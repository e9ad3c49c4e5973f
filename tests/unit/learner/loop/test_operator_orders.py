"""The learner follows each order of an operator once, and every new one."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.store.fleet import Orders
from penstock_learner.loop.step_loop import OperatorOrders
from penstock_learner.term import Term


async def test_an_order_is_followed_also_after_redis_has_lost_some() -> None:
    """The checkpoint counts orders too. The learner would ignore the next one, while it holds the servers."""
    ordered = Orders(num_rewinds=0)

    class Control:
        async def orders(self) -> Orders:
            return ordered

    control: Any = Control()
    orders = OperatorOrders(control, Term(num_orders=2), asyncio.Event())
    assert await orders.new_rewind() is None
    ordered = Orders(num_rewinds=1, rewind_version=3)
    assert await orders.new_rewind() == ordered
