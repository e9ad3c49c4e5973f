"""The replay queue on Redis (6.2 or newer). Every transition is one Lua script, so it happens whole or not at all.

The scripts are in `lua/`, and who calls them in `on_redis/`. penstock.replay.on_redis.group_payloads moves the groups'
bytes.
"""

from __future__ import annotations

from penstock.replay.on_redis.consumer import RedisConsumer
from penstock.replay.on_redis.intake import RedisIntake
from penstock.replay.on_redis.producer import RedisProducer


class RedisReplayQueue(RedisIntake, RedisProducer, RedisConsumer):
    """PromptIntake, GroupProducer and GroupConsumer of one run. `term` is 0 until `take_term` was called."""
