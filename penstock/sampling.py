"""The sampling parameters: names, types, bounds, defaults and descriptions.

This is their only list. Config fields, REST records, command-line flags, the checks of requests and the codec are
derived from it; the protos, the engines and the protocols of others name the parameters again (docs/extending.md).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from penstock.errors import InvalidInput


@dataclass(frozen=True)
class Distribution:
    """Parameters that shape the distribution from which tokens are sampled."""

    temperature: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="Sampling temperature. 0 is greedy decoding.")
    ] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, description=(
        "Nucleus sampling: sample from the smallest set of tokens whose probabilities add up to this. 1 turns it off."
    ))] = 1.0  # fmt: skip
    top_k: Annotated[
        int, Field(ge=0, lt=2**31, description="Sample from this many of the most likely tokens. 0 turns it off.")
    ] = 0
    min_p: Annotated[float, Field(ge=0, lt=1, description=(
        "Sample from tokens that are at least this likely, compared with the most likely one. 0 turns it off."
    ))] = 0.0  # fmt: skip

    @property
    def is_truncated(self) -> bool:
        """Whether unlikely tokens are never sampled. The log-probs of the others are then higher than those of the
        whole distribution."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def distribution(self) -> dict[str, Any]:
        """The parameters of this class by name."""
        return {name: getattr(self, name) for name in DISTRIBUTION_FIELDS}


@dataclass(frozen=True)
class SamplingParameters(Distribution):
    """All parameters that the prompts of a dataset have in common."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31, description="Maximum number of tokens in a response.")] = 256
    ignore_eos: Annotated[bool, Field(description="Go on after a stop token, up to `max_tokens`.")] = False
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(description="Texts that end a response. The text itself stays in the response."),
    ] = ()


@dataclass(frozen=True)
class Sampling(SamplingParameters):
    """Sampling parameters of a prompt."""

    seed: Annotated[Annotated[int, Field(ge=-(2**63), lt=2**63)] | None, Field(description=(
        "Sample i of a prompt is drawn with `seed + i`. None leaves the engine unseeded."
    ))] = None  # fmt: skip


DISTRIBUTION_FIELDS = tuple(field.name for field in fields(Distribution))
SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))
_BOUNDS = TypeAdapter(Sampling)


@lru_cache(maxsize=256)
def check_sampling(sampling: Sampling) -> None:
    """Raise InvalidInput if a parameter is out of its bounds."""
    try:
        _BOUNDS.validate_python({name: getattr(sampling, name) for name in SAMPLING_FIELDS})
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].replace("Input should be", "must be").replace("String should have", "must have")
        raise InvalidInput(f"sampling.{first['loc'][0]}", message) from error


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each of SamplingParameters, such as `--top-p`."""
    for name, hint in get_type_hints(SamplingParameters, include_extras=True).items():
        field, default = FieldInfo.from_annotation(hint), getattr(SamplingParameters, name)
        options: dict[str, Any] = {"type": field.annotation, "default": default}
        if default is False:
            options = {"action": "store_true"}
        elif default == ():
            options = {"action": "append", "default": [], "metavar": "TEXT"}
        text = (field.description or "").replace("%", "%%")
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"{text} (default: %(default)s)", **options)


def sampling_from_flags(args: argparse.Namespace) -> Sampling:
    """Raises InvalidInput if a parameter is out of its bounds."""
    given = {field.name: getattr(args, field.name) for field in fields(SamplingParameters)}
    sampling = Sampling(**given | {"stop": tuple(given["stop"])})
    check_sampling(sampling)
    return sampling
