"""Checks of fields that the requests of several resources have, and the tokens of pages.

Each check raises InvalidInput with the path of the wrong field. None changes its argument.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from penstock.api.conversion import MAX_KEY_LENGTH, check_levels, parse_json
from penstock.codec import sampling_from_proto
from penstock.errors import InvalidInput, NotFound
from penstock.sampling import check_sampling
from penstock.trajectory import MESSAGE_FIELDS
from penstock.v1 import prompts_pb2

T = TypeVar("T")
MAX_PROMPT_ID = 2**32 - 1
"""The queue keeps trained prompts in a Redis bitmap, which has no higher bits."""
MAX_NUM_SAMPLES = 1024
DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000


def keys(idempotency_key: str, prompt_keys: Sequence[str], num_prompts: int) -> None:
    """Check the keys of a submission: one for the request, one for each prompt, or none."""
    if len(idempotency_key) > MAX_KEY_LENGTH:
        raise InvalidInput("idempotency_key", f"may have {MAX_KEY_LENGTH} characters, not {len(idempotency_key)}")
    if prompt_keys and idempotency_key:
        raise InvalidInput("prompt_keys", "cannot be combined with an idempotency key; send one of them")
    if prompt_keys and (num_keys := len(prompt_keys)) != num_prompts:
        raise InvalidInput("prompt_keys", f"must have a key for each of the {num_prompts} prompts, not {num_keys}")
    first_at: dict[str, int] = {}
    for index, key in enumerate(prompt_keys):
        if first_at.setdefault(key, index) != index:
            raise InvalidInput(
                f"prompt_keys[{index}]",
                f"repeats {key!r}, the key of prompts[{first_at[key]}]; each prompt needs its own key",
            )
        if not 1 <= len(key) <= MAX_KEY_LENGTH:
            raise InvalidInput(f"prompt_keys[{index}]", f"must have 1 to {MAX_KEY_LENGTH} characters, not {len(key)}")


def page_size(given: int) -> int:
    if given < 0:
        raise InvalidInput("page_size", "must not be negative; 0 takes the default")
    return min(given or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def page_token(kind: str, position: int | str) -> str:
    return base64.urlsafe_b64encode(f"{kind}:{position}".encode()).decode().rstrip("=")


def page_position(kind: str, token: str, position: str = r"-?[0-9]{1,19}") -> str | None:
    """The position after which the next page starts; None for the first page. `kind` is the list that issued it."""
    if not token:
        return None
    try:
        text = base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        text = ""
    found_kind, _, found = text.partition(":")
    if found_kind == kind and re.fullmatch(position, found):
        return found
    raise InvalidInput("page_token", "was not issued by this service for this list; start again without one")


def cut_page(kind: str, found: Sequence[T], page_size: int, position: Callable[[T], Any]) -> tuple[Sequence[T], str]:
    """The first page of what was found, and the token of the next page. It is empty if everything fits."""
    page = found[:page_size]
    return page, page_token(kind, position(page[-1])) if len(found) > page_size else ""


def prompt_id(given: int) -> None:
    if not 1 <= given <= MAX_PROMPT_ID:
        raise NotFound(f"prompt {given} does not exist")


def messages(given: Sequence[prompts_pb2.Message]) -> None:
    for index, message in enumerate(given):
        if not message.role.strip():
            raise InvalidInput(f"messages[{index}].role", "must not be empty")
        if message.fields_json:
            path = f"messages[{index}].fields_json"
            fields = json_value(message.fields_json, path)
            if not isinstance(fields, dict) or fields.keys() - MESSAGE_FIELDS:
                raise InvalidInput(path, f"must be a JSON object with some of {', '.join(MESSAGE_FIELDS)}")


def token_ids(given: bytes) -> None:
    if len(given) % 4:
        raise InvalidInput("token_ids", "must be little-endian int32, 4 bytes a token")
    if (np.frombuffer(given, dtype="<i4") < 0).any():
        raise InvalidInput("token_ids", "must not be negative")


def sampling(given: prompts_pb2.Sampling) -> None:
    _check_encoded_sampling(given.SerializeToString())


@lru_cache(maxsize=256)
def _check_encoded_sampling(encoded: bytes) -> None:
    """Most prompts of a run have the same parameters."""
    check_sampling(sampling_from_proto(prompts_pb2.Sampling.FromString(encoded)))


def json_value(text: str, path: str) -> Any:
    if text == "{}":
        return {}
    try:
        check_levels(text)
        return parse_json(text)
    except ValueError as error:
        raise InvalidInput(path, f"is not valid JSON: {error}") from error
