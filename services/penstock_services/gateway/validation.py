"""Checks of request fields. Each raises InvalidInput with the path of the wrong field. None changes its argument."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from penstock.api.conversion import check_levels, parse_json
from penstock.codec import prompt_to_proto, sampling_from_proto
from penstock.errors import InvalidInput, NotFound
from penstock.sampling import check_sampling as check_bounds
from penstock.trajectory import MESSAGE_FIELDS, Prompt
from penstock.v1 import prompts_pb2

MAX_PROMPT_ID = 2**32 - 1
"""The queue keeps trained prompts in a Redis bitmap, which has no higher bits."""
MAX_NUM_SAMPLES = 1024
MAX_PRIORITY = 1000
"""The queue sorts by priority · 1e12 + id as a double, which is exact up to a priority of about 9000."""
MAX_KEY_LENGTH = 256
DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000
_DEFAULT = prompt_to_proto(Prompt())
T = TypeVar("T")


def checked_prompts(
    prompts: Sequence[prompts_pb2.Prompt], max_prompts: int, evaluation_id: str = ""
) -> list[prompts_pb2.Prompt]:
    """Return the prompts with absent fields filled in, or raise InvalidInput for the first wrong one.

    A prompt is copied before fields are filled in. A prompt that names an evaluation other than `evaluation_id` is
    refused, because held-out prompts must never be trained."""
    if not prompts:
        raise InvalidInput("prompts", "give at least one prompt")
    if len(prompts) > max_prompts:
        raise InvalidInput("prompts", f"a request may have {max_prompts}, not {len(prompts)}; split it")
    checked = []
    for index, prompt in enumerate(prompts):
        ground_truth, extra_info = prompt.ground_truth_json, prompt.extra_info_json
        is_complete = ground_truth and extra_info and prompt.HasField("sampling")
        complete = prompt if is_complete else _with_defaults(prompt)
        try:
            _check_prompt(complete, evaluation_id)
            if ground_truth:
                check_json(ground_truth, "ground_truth_json")
            if extra_info and not isinstance(check_json(extra_info, "extra_info_json"), dict):
                raise InvalidInput("extra_info_json", "must be a JSON object")
        except InvalidInput as error:
            raise error.under(f"prompts[{index}]") from error
        if evaluation_id:
            if complete is prompt:
                complete = _with_defaults(prompt)
            complete.evaluation_id = evaluation_id
        checked.append(complete)
    return checked


def check_keys(idempotency_key: str, keys: Sequence[str], num_prompts: int) -> None:
    """Check the keys of a submission: one for the request, one for each prompt, or none."""
    if len(idempotency_key) > MAX_KEY_LENGTH:
        raise InvalidInput("idempotency_key", f"may have {MAX_KEY_LENGTH} characters, not {len(idempotency_key)}")
    if keys and idempotency_key:
        raise InvalidInput("prompt_keys", "cannot be combined with an idempotency key; send one of them")
    if keys and len(keys) != num_prompts:
        raise InvalidInput("prompt_keys", f"must have a key for each of the {num_prompts} prompts, not {len(keys)}")
    first_at: dict[str, int] = {}
    for index, key in enumerate(keys):
        if first_at.setdefault(key, index) != index:
            raise InvalidInput(
                f"prompt_keys[{index}]",
                f"repeats {key!r}, the key of prompts[{first_at[key]}]; each prompt needs its own key",
            )
        if not 1 <= len(key) <= MAX_KEY_LENGTH:
            raise InvalidInput(f"prompt_keys[{index}]", f"must have 1 to {MAX_KEY_LENGTH} characters, not {len(key)}")


def checked_page_size(page_size: int) -> int:
    if page_size < 0:
        raise InvalidInput("page_size", "must not be negative; 0 takes the default")
    return min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def encode_page_token(kind: str, position: int | str) -> str:
    return base64.urlsafe_b64encode(f"{kind}:{position}".encode()).decode().rstrip("=")


def decode_page_token(kind: str, token: str, position: str = r"-?[0-9]{1,19}") -> str | None:
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
    return page, encode_page_token(kind, position(page[-1])) if len(found) > page_size else ""


def checked_prompt_ids(prompt_ids: Sequence[int], max_ids: int, field: str = "prompt_ids") -> list[int]:
    if len(prompt_ids) > max_ids:
        raise InvalidInput(field, f"a request may have {max_ids}, not {len(prompt_ids)}; split it")
    for index, prompt_id in enumerate(prompt_ids):
        if not 1 <= prompt_id <= MAX_PROMPT_ID:
            raise InvalidInput(f"{field}[{index}]", f"must be between 1 and {MAX_PROMPT_ID}")
    return list(prompt_ids)


def check_prompt_id(prompt_id: int) -> None:
    if not 1 <= prompt_id <= MAX_PROMPT_ID:
        raise NotFound(f"prompt {prompt_id} does not exist")


def _with_defaults(prompt: prompts_pb2.Prompt) -> prompts_pb2.Prompt:
    complete = prompts_pb2.Prompt()
    complete.CopyFrom(prompt)
    if not complete.HasField("sampling"):
        complete.sampling.CopyFrom(_DEFAULT.sampling)
    complete.ground_truth_json = complete.ground_truth_json or _DEFAULT.ground_truth_json
    complete.extra_info_json = complete.extra_info_json or _DEFAULT.extra_info_json
    return complete


def _check_prompt(prompt: prompts_pb2.Prompt, evaluation_id: str) -> None:
    messages, token_ids = prompt.messages, prompt.token_ids
    if bool(messages) == bool(token_ids):
        raise InvalidInput("", "give exactly one of messages and token_ids")
    check_messages(messages)
    if token_ids:
        check_token_ids(token_ids)
    if not 1 <= prompt.num_samples <= MAX_NUM_SAMPLES:
        raise InvalidInput("num_samples", f"must be between 1 and {MAX_NUM_SAMPLES}, not {prompt.num_samples}")
    if not -MAX_PRIORITY <= prompt.priority <= MAX_PRIORITY:
        raise InvalidInput("priority", f"must be between -{MAX_PRIORITY} and {MAX_PRIORITY}")
    if len(prompt.data_source) > MAX_KEY_LENGTH or not prompt.data_source.isprintable():
        raise InvalidInput("data_source", f"may have {MAX_KEY_LENGTH} characters, none of them a control character")
    check_sampling(prompt.sampling)
    if prompt.evaluation_id not in ("", evaluation_id):
        raise InvalidInput("evaluation_id", "leave it empty; create an evaluation for held-out prompts")


def check_messages(messages: Sequence[prompts_pb2.Message]) -> None:
    for index, message in enumerate(messages):
        if not message.role.strip():
            raise InvalidInput(f"messages[{index}].role", "must not be empty")
        if message.fields_json:
            path = f"messages[{index}].fields_json"
            fields = check_json(message.fields_json, path)
            if not isinstance(fields, dict) or fields.keys() - MESSAGE_FIELDS:
                raise InvalidInput(path, f"must be a JSON object with some of {', '.join(MESSAGE_FIELDS)}")


def check_token_ids(token_ids: bytes) -> None:
    if len(token_ids) % 4:
        raise InvalidInput("token_ids", "must be little-endian int32, 4 bytes a token")
    if (np.frombuffer(token_ids, dtype="<i4") < 0).any():
        raise InvalidInput("token_ids", "must not be negative")


def check_sampling(sampling: prompts_pb2.Sampling) -> None:
    _check_encoded_sampling(sampling.SerializeToString())


@lru_cache(maxsize=256)
def _check_encoded_sampling(encoded: bytes) -> None:
    """Most prompts of a run have the same parameters."""
    check_bounds(sampling_from_proto(prompts_pb2.Sampling.FromString(encoded)))


def check_json(text: str, path: str) -> Any:
    if text == "{}":
        return {}
    try:
        check_levels(text)
        return parse_json(text)
    except ValueError as error:
        raise InvalidInput(path, f"is not valid JSON: {error}") from error
