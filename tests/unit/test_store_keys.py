"""The names of keys: the same in Python, in Lua and in the users' permissions."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from penstock.store.keys import RunKeys, key_names, lua_names
from penstock.store.redis_client import QUEUE, SESSIONS, STORE, ScriptFolder

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    (folder, entry.name.removesuffix(".lua"))
    for folder in (STORE, QUEUE, SESSIONS)
    for entry in (resources.files(folder.package) / "lua").iterdir()
    if not entry.name.startswith("prelude")
]


def test_names() -> None:
    keys = RunKeys("demo")
    assert keys.counters == "penstock:{demo}:counters"
    assert keys.group(7, 1) == "penstock:{demo}:group:7:1"
    assert keys.session("s", "calls") == "penstock:{demo}:session:s:calls"
    assert lua_names("COUNTERS, GROUP").splitlines() == [
        "local PREFIX = KEYS[1]",
        "local COUNTERS = PREFIX .. 'counters'",
        "local GROUP = PREFIX .. 'group:'",
    ]


@pytest.mark.parametrize(("folder", "name"), SCRIPTS, ids=str)
def test_scripts_take_every_key_from_the_list(folder: ScriptFolder, name: str) -> None:
    own = (resources.files(folder.package) / "lua" / f"{name}.lua").read_text()
    assert "KEYS[" not in own.replace("KEYS[1] is", "") and "penstock:" not in own
    assert "PREFIX .." not in own
    commands = re.findall(r"redis\.call\('\w+', (\w+)", folder.load(name).text)
    defined = set(re.findall(r"local ([A-Z_]+) = PREFIX", folder.load(name).text))
    assert {key for key in commands if key.isupper()} <= defined


@pytest.mark.parametrize(("folder", "name"), SCRIPTS, ids=str)
def test_a_script_has_the_functions_that_it_uses(folder: ScriptFolder, name: str) -> None:
    preludes = "".join(
        entry.read_text()
        for package in {STORE.package, folder.package}
        for entry in (resources.files(package) / "lua").iterdir()
        if entry.name.startswith("prelude")
    )
    text = folder.load(name).text
    assert not re.search(r"^\s*--", text, re.MULTILINE)
    for function in re.findall(r"^local function (\w+)", preludes, re.MULTILINE):
        first = re.search(rf"(local function )?\b{function}\(", text)
        assert first is None or first[1], f"{function} is used before it is defined"


def test_a_script_has_no_functions_that_it_does_not_use() -> None:
    functions = re.findall(r"^local function (\w+)", QUEUE.load("heartbeat").text, re.MULTILINE)
    assert functions == ["now_ms", "run_when_full"]


def test_a_function_that_one_other_function_uses_is_made_when_that_one_is_called() -> None:
    text = QUEUE.load("append").text
    assert "local function drop_all_saved(ids)\nlocal function drop_saved(id)\n" in text


@pytest.mark.parametrize("path", ["deploy/redis/users.acl", "helm/penstock/files/users.acl"])
def test_the_users_may_touch_these_keys_and_no_others(path: str) -> None:
    patterns = {
        pattern
        for line in (ROOT / path).read_text().splitlines()
        if line.split()[1] in ("gateway", "rollout", "learner")
        for pattern in re.findall(r"~(\S+)", line)
    }
    run_patterns = {pattern for pattern in patterns if pattern.startswith("penstock:{*}:")}
    assert patterns == run_patterns
    expected = {f"penstock:{{*}}:{name}{':*' * is_family}" for name, is_family in key_names()}
    assert run_patterns == expected | {RunKeys("*").prefix}
