"""The sampling parameters: names, types, bounds, defaults and descriptions.

This is their only list. Config fields, REST records, command-line flags, the checks of requests, the codec and
recordings are derived from it; the protos, the engines and the protocols of others name the parameters again
(docs/extending.md).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen

from penstock.errors import InvalidInput


@dataclass(frozen=True)
class Description:
    """What a parameter means, for the reference of the config, OpenAPI and the help of a command."""

    text: str
    help: str

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        described: dict[str, Any] = handler(schema) | {"description": self.text}
        return described


@dataclass(frozen=True)
class Distribution:
    """Parameters that shape the distribution from which tokens are sampled."""

    __pydantic_config__ = {"allow_inf_nan": False}

    temperature: Annotated[
        float, Ge(0), Description("Sampling temperature. 0 is greedy decoding.", "sampling temperature; 0 is greedy")
    ] = 1.0
    top_p: Annotated[float, Gt(0), Le(1), Description(
        "Nucleus sampling: sample from the smallest set of tokens whose probabilities add up to this. 1 turns it off.",
        "nucleus sampling",
    )] = 1.0  # fmt: skip
    top_k: Annotated[int, Ge(0), Lt(2**31), Description(
        "Sample from this many of the most likely tokens. 0 turns it off.", "sample from this many tokens; 0: all"
    )] = 0  # fmt: skip
    min_p: Annotated[float, Ge(0), Lt(1), Description(
        "Sample from tokens that are at least this likely, compared with the most likely one. 0 turns it off.",
        "least probability, relative to the best token's",
    )] = 0.0  # fmt: skip

    @property
    def is_truncated(self) -> bool:
        """Whether unlikely tokens are never sampled, so that the log-probs of the others are higher."""
        return self.temperature > 0 and self.kept_probability < 1

    @property
    def kept_probability(self) -> float:
        """The least total probability of the tokens that may be sampled. Only top-p says it; under any other parameter
        it may be anything, so 0."""
        others = (name for name in DISTRIBUTION_FIELDS if name not in ("temperature", "top_p"))
        return 0.0 if any(getattr(self, name) != getattr(Distribution, name) for name in others) else self.top_p

    @property
    def distribution(self) -> dict[str, Any]:
        """The parameters of this class by name."""
        return {name: getattr(self, name) for name in DISTRIBUTION_FIELDS}


@dataclass(frozen=True)
class SamplingParameters(Distribution):
    """All parameters that the prompts of a dataset have in common."""

    max_tokens: Annotated[
        int, Ge(1), Lt(2**31), Description("Maximum number of tokens in a response.", "longest response")
    ] = 256
    ignore_eos: Annotated[bool, Description(
        "Go on after a stop token, up to `max_tokens`.", "go on after a stop token, up to --max-tokens"
    )] = False  # fmt: skip
    stop: Annotated[tuple[Annotated[str, MinLen(1)], ...], Description(
        "Texts that end a response. The text itself stays in the response.", "end a response after this text"
    )] = ()  # fmt: skip


@dataclass(frozen=True)
class Sampling(SamplingParameters):
    """Sampling parameters of a prompt."""

    seed: Annotated[Annotated[int, Ge(-(2**63)), Lt(2**63)] | None, Description(
        "Sample i of a prompt is drawn with `seed + i`. None leaves the engine unseeded.", "seed of the first sample"
    )] = None  # fmt: skip


DISTRIBUTION_FIELDS = tuple(field.name for field in fields(Distribution))
SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))


def check_sampling(sampling: Sampling) -> None:
    """Raise InvalidInput if a parameter is out of its bounds."""
    from pydantic import ValidationError

    try:
        _bounds().validate_python({name: getattr(sampling, name) for name in SAMPLING_FIELDS})
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].replace("Input should be", "must be").replace("String should have", "must have")
        raise InvalidInput(f"sampling.{first['loc'][0]}", message) from error


@cache
def _bounds() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Sampling)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each of SamplingParameters, such as `--top-p`."""
    for name, hint in get_type_hints(SamplingParameters, include_extras=True).items():
        (kind, *_, description), default = get_args(hint), getattr(SamplingParameters, name)
        flag, text = f"--{name.replace('_', '-')}", description.help
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=text)
        elif default == ():
            parser.add_argument(flag, action="append", default=[], metavar="TEXT", help=text)
        else:
            parser.add_argument(flag, type=kind, default=default, help=f"{text} (default: %(default)s)")


def sampling_from_flags(args: argparse.Namespace) -> Sampling:
    """Raises InvalidInput if a parameter is out of its bounds."""
    given = {field.name: getattr(args, field.name) for field in fields(SamplingParameters)}
    sampling = Sampling(**given | {"stop": tuple(given["stop"])})
    check_sampling(sampling)
    return sampling
