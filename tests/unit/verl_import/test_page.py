"""The page for people who come from other trainers names fields of ours that exist."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.config.run import RunConfig

PAGE = Path(__file__).parents[3] / "docs" / "coming-from-verl.md"
SECTIONS = "|".join(RunConfig.model_fields)


def test_every_dotted_field_on_the_page_exists() -> None:
    schema = RunConfig.model_json_schema()
    named = set(re.findall(rf"`((?:{SECTIONS})\.[a-z_.]+[a-z_])[`:]", PAGE.read_text())) - PEERS
    assert len(named) > 40
    missing = sorted(name for name in named if not _exists(schema, name.split(".")))
    assert not missing


def _exists(schema: dict[str, object], path: list[str]) -> bool:
    """Whether a JSON schema has the field."""
    nodes: list[dict[str, object]] = [schema]
    for part in path:
        nodes = [node for node in _inner(schema, nodes) if part in _properties(node)]
        nodes = [_properties(node)[part] for node in nodes]
    return bool(nodes)


def _inner(schema: dict[str, object], nodes: list[dict[str, object]]) -> list[dict[str, object]]:
    found = []
    for node in nodes:
        choices = node.get("anyOf", [])
        assert isinstance(choices, list)
        for part in (node, *choices):
            name = str(part.get("$ref", "")).rpartition("/")[2]
            definitions = schema["$defs"]
            assert isinstance(definitions, dict)
            found.append(definitions[name] if name else part)
    return found


def _properties(node: dict[str, object]) -> dict[str, dict[str, object]]:
    properties = node.get("properties", {})
    assert isinstance(properties, dict)
    return properties


PEERS = {"rollout.batch_size"}
"""Names of other trainers that begin with one of our sections."""
