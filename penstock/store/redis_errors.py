"""Translates errors of Redis to those of penstock.errors."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

from redis.exceptions import AuthenticationError, NoScriptError, OutOfMemoryError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.errors import Fenced, PenstockError, QueueFull, Unavailable


class RedisCannotWrite(RedisConnectionError):
    """Redis answers MISCONF: it accepts no writes until it can write to its disk again. Like a Redis that does not
    answer, it may recover."""


def cannot_write(message: str) -> RedisCannotWrite | None:
    """The error for an answer of Redis that says MISCONF; None for any other."""
    if "MISCONF" not in message:
        return None
    return RedisCannotWrite(
        "Redis accepts no writes because it cannot write to its disk; free space on the disk of its append-only file, "
        f"then it goes on by itself ({' '.join(message[message.index('MISCONF') :].split())[:200]})"
    )


@contextmanager
def redis_errors() -> Iterator[None]:
    """Translate every RedisError that is raised inside, except NoScriptError: callers handle it by sending the
    script."""
    try:
        yield
    except NoScriptError:
        raise
    except AuthenticationError as error:
        raise Unavailable(
            f"Redis refuses the user or password ({error}); correct redis.url, or redis.password_file"
        ) from error
    except RedisCannotWrite as error:
        raise Unavailable(str(error)) from error
    except (RedisConnectionError, RedisTimeoutError) as error:
        raise Unavailable(f"Redis does not answer ({error}); check redis.url and that the server runs") from error
    except OutOfMemoryError as error:
        raise QueueFull("Redis is out of memory; producers wait until the learner has committed") from error
    except ResponseError as error:
        raise _translate_response(str(error)) from error
    except RedisError as error:
        raise PenstockError(f"Redis: {error}") from error


async def guarded(call: Awaitable[Any]) -> Any:
    """Await one call of a Redis client and translate its errors."""
    with redis_errors():
        return await call


def _translate_response(message: str) -> PenstockError:
    if passed := re.search(r"FENCED term (\d+) has passed; the current one is (\d+)", message):
        own, current = int(passed[1]), int(passed[2])
        if current < own:  # terms only grow
            return Fenced(
                f"Redis has lost data: it knows terms up to {current}, and this learner has term {own}; restore Redis' "
                "data, then start the learner again"
            )
    if "FENCED" in message:
        return Fenced(message[message.index("FENCED") + 7 :] + "; another learner has taken over, stop this one")
    if refusal := cannot_write(message):
        return Unavailable(str(refusal))
    if "OOM command not allowed" in message:
        return QueueFull("Redis is out of memory; producers wait until the learner has committed")
    return PenstockError(f"Redis refused a command: {message}")
