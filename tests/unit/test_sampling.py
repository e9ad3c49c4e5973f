"""One declaration of the sampling parameters: every place that names them has all of them."""

import argparse
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest

import penstock_rollout.engines
from penstock.api import conversion, records
from penstock.codec import sampling_from_proto, sampling_to_proto, trajectory_from_proto, trajectory_to_proto
from penstock.config.dataset import DatasetConfig, SamplingConfig, ValidationConfig
from penstock.errors import InvalidInput
from penstock.protocols.bodies import SamplingBody
from penstock.sampling import (
    DISTRIBUTION_FIELDS,
    SAMPLING_FIELDS,
    Sampling,
    SamplingParameters,
    add_sampling_flags,
    check_sampling,
    sampling_from_flags,
)
from penstock.trajectory import SamplingSegment
from penstock.v1 import groups_pb2, prompts_pb2
from penstock_tools.offline import answers
from penstock_tools.recordings import recording
from support.groups import made_by

OF_A_DATASET = tuple(field.name for field in fields(SamplingParameters))
NOT_IN_PROTOCOLS = {"max_tokens", "stop", "seed"}
"""Each protocol has its own names for these."""
ENGINES = Path(penstock_rollout.engines.__file__).parent
ELSEWHERE = {
    "torch": {"stop": "the agent's transcript finds them", "max_tokens": "engine.py"},
    "vllm": {"stop": "the agent's transcript finds them"},
    "sglang": {"stop": "the agent's transcript finds them"},
}


def other_value(name: str) -> Any:
    """A value within the bounds that is not the default."""
    default = getattr(Sampling(), name)
    if isinstance(default, bool):
        return not default
    return {tuple: ("\n\n",), type(None): 7, int: 3, float: 0.25}[type(default)]


def all_changed() -> Sampling:
    return Sampling(**{name: other_value(name) for name in SAMPLING_FIELDS})


def test_protos_have_every_parameter():
    assert {field.name for field in prompts_pb2.Sampling.DESCRIPTOR.fields} == set(SAMPLING_FIELDS)
    segment = {field.name for field in groups_pb2.SamplingSegment.DESCRIPTOR.fields}
    assert segment == {"start", "end", *DISTRIBUTION_FIELDS}


def test_codec_keeps_every_parameter():
    assert sampling_from_proto(sampling_to_proto(all_changed())) == all_changed()
    assert sampling_from_proto(sampling_to_proto(Sampling())) == Sampling()
    segment = SamplingSegment(0, 4, **all_changed().distribution)
    sampled = replace(made_by(1, 0).trajectories[0], sampling_segments=(segment,))
    stored = trajectory_from_proto(trajectory_to_proto(sampled))
    assert stored.sampling_segments == (segment,)


def test_rest_has_every_parameter():
    assert set(records.Sampling.model_fields) == set(SAMPLING_FIELDS)
    assert set(records.SamplingSegment.model_fields) == {"start", "end", *DISTRIBUTION_FIELDS}
    message = conversion.request_of(prompts_pb2.Sampling, records.Sampling(**vars(all_changed())))
    assert sampling_from_proto(message) == all_changed()
    assert records.Sampling(**conversion.to_json(message, records.Sampling)) == records.Sampling(**vars(all_changed()))


def test_protocols_have_every_parameter():
    assert set(SAMPLING_FIELDS) - NOT_IN_PROTOCOLS <= set(SamplingBody.model_fields)
    given = {name: other_value(name) for name in SAMPLING_FIELDS if name not in NOT_IN_PROTOCOLS}
    request = SamplingBody(model="run", **given).base_request("", max_tokens=3, seed=7)
    assert sampling_from_proto(request.sampling) == replace(all_changed(), stop=())


@pytest.mark.parametrize("config", [SamplingConfig, DatasetConfig, ValidationConfig])
def test_config_has_every_parameter_with_its_description(config):
    assert set(OF_A_DATASET) <= set(config.model_fields)
    assert all(config.model_json_schema()["properties"][name]["description"] for name in OF_A_DATASET)
    given = {name: other_value(name) for name in OF_A_DATASET}
    assert config(**given).sampling == replace(all_changed(), seed=None)


def test_command_line_has_a_flag_for_every_parameter():
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser)
    assert sampling_from_flags(parser.parse_args([])) == Sampling()
    words = []
    for name in OF_A_DATASET:
        value = other_value(name)
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [flag, value[0] if isinstance(value, tuple) else str(value)]
    assert sampling_from_flags(parser.parse_args(words)) == replace(all_changed(), seed=None)
    assert all(name.replace("_", "-") in parser.format_help() for name in OF_A_DATASET)


@dataclass(frozen=True)
class WithNewParameters(Sampling):
    """Sampling parameters as they would be with new ones of each kind."""

    share: float = 0.0
    count: int = 0
    flag: bool = False
    words: tuple[str, ...] = ()
    start: int | None = None


def test_recordings_keep_every_parameter():
    segment = SamplingSegment(0, 4, **all_changed().distribution)
    made = made_by(1, 0)
    sampled = replace(made.trajectories[0], sampling_segments=(segment,))
    group = replace(made, sampling=all_changed(), trajectories=(sampled,))
    (read,) = recording.from_record_batch(recording.to_record_batch([recording.RecordedGroup(group, b"")]))
    assert read.group.sampling == all_changed()
    assert read.group.trajectories[0].sampling_segments == (segment,)


def test_recordings_have_a_column_of_the_declared_type_for_a_new_parameter():
    columns = dict(recording.sampling_columns(WithNewParameters))
    assert set(columns) == {*SAMPLING_FIELDS, "share", "count", "flag", "words", "start"}
    given = {"share": 0.25, "count": 3, "flag": True, "words": ["\n\n"], "start": 2**40}
    table = pyarrow.Table.from_pylist([given], schema=pyarrow.schema([(name, columns[name]) for name in given]))
    assert table.to_pylist() == [given]


def test_recordings_without_a_parameter_are_read_with_its_default():
    in_the_first = {"temperature", "top_p", "max_tokens", "seed"}
    assert set(SAMPLING_FIELDS) - in_the_first <= recording.OPTIONAL
    whole = recording.SCHEMA.field("sampling").type
    short = pyarrow.struct([field for field in whole if field.name in in_the_first])
    assert recording._is_readable(short, whole)


def test_settings_of_offline_answers_name_every_parameter_that_is_not_usual():
    assert answers.describe_sampling(Sampling()) == "temperature 1, top_p 1, max_tokens 256, seed None"
    words = answers.describe_sampling(WithNewParameters(**vars(all_changed()), share=0.25, count=3, flag=True))
    assert all(f"{name} " in words for name in (*SAMPLING_FIELDS, "share", "count", "flag"))


@pytest.mark.parametrize("name", sorted(set(DISTRIBUTION_FIELDS) - {"temperature"}))
def test_every_parameter_of_the_distribution_counts_as_a_truncation(name):
    """So that the agreement of servers allows for it, whichever it is."""
    changed = replace(Sampling(), **{name: other_value(name)})
    assert changed.is_truncated
    assert changed.kept_probability == (0.25 if name == "top_p" else 0.0)
    assert not Sampling().is_truncated
    assert not replace(changed, temperature=0.0).is_truncated


@pytest.mark.parametrize("engine", ELSEWHERE)
@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_every_engine_maps_or_refuses_every_parameter(engine, name):
    if name not in ELSEWHERE[engine]:
        source = "".join(path.read_text() for path in sorted((ENGINES / engine).glob("*.py")))
        assert f"sampling.{name}" in source


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", float("inf")), ("temperature", float("nan")), ("top_p", 0.0),
        ("top_p", 1.5), ("top_k", -1), ("min_p", 1.0), ("min_p", -0.1), ("max_tokens", 0), ("stop", ("",)),
    ],
)  # fmt: skip
def test_parameters_out_of_bounds_are_refused_by_name(name, value):
    with pytest.raises(InvalidInput, match="must") as error:
        check_sampling(replace(Sampling(), **{name: value}))
    assert error.value.field == f"sampling.{name}"
    if isinstance(value, tuple) or math.isfinite(value):  # JSON has no other numbers
        with pytest.raises(ValueError, match=name):
            records.Sampling(**{name: value})


def test_parameters_within_their_bounds_pass():
    check_sampling(Sampling())
    check_sampling(all_changed())
