"""Faults inside Lua scripts: an error at a call, keys of a wrong type, broken values, a full Redis, and a script that
does not end.

Redis does not undo what a failed script has written. `ScriptFaults.check` runs a script from the present state of a
real Redis under every such fault. Each time the script must fail with the state as before, or do all of its work.

Errors are injected at every call up to the first write. After it a script can still end by exactly these errors, and
each is excluded by what the script did before its first write:

    WRONGTYPE of a key      a call of the same type has read or checked the key
    HINCRBY of no number    the field was read, or the script has written it, or drawn it as a new id
    no memory               Redis refuses the first write, or none
    an error() of its own   no check of the script is reached, except one of a value that passed it before

The last is seen by rewriting the text: every condition of an error(), and every decoding, reports that it is reached.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, cast

import pytest
import redis
from redis.exceptions import ResponseError

from penstock.replay.group_payloads import GroupPayloads
from penstock.store.redis_client import QUEUE, SESSIONS, STORE, ScriptFolder

FOLDERS = (STORE, QUEUE, SESSIONS)
READS = {
    "hash": "HEXISTS HGET HGETALL HKEYS HLEN HMGET HSTRLEN HVALS",
    "zset": "ZCARD ZCOUNT ZMSCORE ZRANGE ZRANGEBYSCORE ZREVRANGE ZREVRANGEBYSCORE ZSCORE",
    "set": "SCARD SISMEMBER SMEMBERS",
    "stream": "XRANGE XREVRANGE XLEN",
    "list": "LLEN LRANGE",
    "string": "GET GETBIT",
    "any": "EXISTS",
    "none": "TIME",
}
WRITES = {
    "hash": "HDEL HINCRBY HINCRBYFLOAT HSET",
    "zset": "ZADD ZREM ZREMRANGEBYRANK",
    "set": "SADD SREM",
    "stream": "XADD XDEL",
    "list": "RPUSH",
    "string": "SET SETBIT BITFIELD",
    "any": "EXPIRE PERSIST UNLINK",
}
TYPES = {command: kind for table in (READS, WRITES) for kind, commands in table.items() for command in commands.split()}
"""The type of the keys that a command takes. Every command of a script must be listed."""
WRONG = {"string": ("SET", "?"), "list": ("RPUSH", "?"), "hash": ("HSET", "?", "?"), "zset": ("ZADD", "1", "?")}
BROKEN = (b"\xc1broken", b"[]", b"7", b"1.5", b"inf", b"9223372036854775807")
"""The first is not JSON, MessagePack or a number. The others are, and not what a record would be, nor a count that Lua
and HINCRBY can both add to."""
State = dict[bytes, Any]
READ_STATE = """
local READS = {hash = {'HGETALL'}, zset = {'ZRANGE', 0, -1, 'WITHSCORES'}, set = {'SMEMBERS'}, list = {'LRANGE', 0, -1},
  stream = {'XRANGE', '-', '+'}, string = {'GET'}}
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind = redis.call('TYPE', key).ok
  local command, first, last, option = unpack(READS[kind])
  local arguments = {command, key, first, last, option}
  found[#found + 1] = {key, kind, redis.call('PTTL', key) > 0 and 1 or 0, redis.call(unpack(arguments))}
end
return found
"""
DUMPS = """
local keys, found = redis.call('KEYS', '*'), {}
table.sort(keys)
for _, key in ipairs(keys) do found[#found + 1] = {key, redis.call('PTTL', key) > 0, redis.call('DUMP', key)} end
return redis.sha1hex(cmsgpack.pack(found))
"""
"""A digest of the state. It changes with the state, and perhaps with the order in which Redis holds a hash. To read the
state itself after each of many runs takes longer."""
COPY_ALL = """
local from, to = unpack(ARGV)
redis.call('SELECT', to)
redis.call('FLUSHDB')
redis.call('SELECT', from)
for _, key in ipairs(redis.call('KEYS', '*')) do redis.call('COPY', key, key, 'DB', to) end
"""
LIVE, KEPT = 0, 1
"""The database that scripts run in, and the one that keeps the state before them."""
TRACED = """
local num_calls, trace, checks, real = 0, {}, {}, redis
local fail_at, hang_at, seconds = tonumber(KEYS[2]), tonumber(KEYS[3]), KEYS[4]
local function reached(what)
  checks[#checks + 1] = num_calls .. ' ' .. what
  return false
end
local redis = setmetatable({call = function(...)
  local arguments = {...}
  num_calls = num_calls + 1
  if num_calls == fail_at then error('injected') end
  while num_calls == hang_at do end
  trace[num_calls] = {}
  for i, argument in ipairs(arguments) do trace[num_calls][i] = tostring(argument) end
  if arguments[1] == 'TIME' then return {seconds, '0'} end
  if arguments[1] == 'XADD' then
    for i, argument in ipairs(arguments) do
      if argument == '*' then arguments[i] = seconds .. '000-' .. num_calls end
    end
  end
  return real.call(unpack(arguments))
end}, {__index = real})
local function script()
%s
end
local answer = script()
while num_calls + 1 == hang_at do end
if type(answer) == 'table' and answer.err then return answer end
return {trace, checks}
"""
"""A script that returns its calls, and its checks, each with the number of calls before it. Its clock stands still, so
that two runs write the same."""


def script_names() -> set[tuple[ScriptFolder, str]]:
    """Every script of the project."""
    found = set()
    for folder in FOLDERS:
        names = [entry.name for entry in (resources.files(folder.package) / "lua").iterdir()]
        found |= {(folder, name.removesuffix(".lua")) for name in names if not name.startswith("prelude")}
    return found


@dataclass(frozen=True)
class Call:
    """One `redis.call` of a script."""

    command: str
    arguments: tuple[bytes, ...]

    @property
    def kind(self) -> str:
        return TYPES[self.command]

    @property
    def keys(self) -> tuple[bytes, ...]:
        if self.kind == "none":
            return ()
        return self.arguments if self.command in ("EXISTS", "UNLINK") else self.arguments[:1]

    @property
    def fields(self) -> tuple[bytes, ...] | None:
        """Fields of a hash that the call reads or writes; None if it may read all."""
        if self.command in ("HGETALL", "HKEYS", "HVALS"):
            return None
        step = 2 if self.command == "HSET" else 1
        return self.arguments[1:2] if "INCR" in self.command else self.arguments[1::step]


@dataclass(frozen=True)
class Run:
    """A run of a script with a fault."""

    error: str
    calls: tuple[Call, ...]
    broken: tuple[tuple[Any, ...], ...]
    """The commands that had broken something before the script began."""
    before: str
    """The digest of the state that the script began with, with what is broken in it."""
    after: str
    checks: tuple[tuple[int, str], ...] = ()
    """The checks that were reached, each with the number of calls before it."""


@dataclass(frozen=True)
class Case:
    """A call of a script from a state, which `dump` restores."""

    folder: ScriptFolder
    name: str
    prefix: str
    arguments: tuple[Any, ...]
    dump: tuple[tuple[bytes, int, bytes], ...]
    state: State = field(compare=False)
    seconds: int = 0

    num_calls: int = 0

    def words(self, *, fail_at: int = 0, hang_at: int = 0) -> tuple[Any, ...]:
        """The arguments of EVAL. The script fails at or never ends from one of its calls. The call after the last is
        its end."""
        return (self.text, 4, self.prefix, fail_at, hang_at, self.seconds, *self.arguments)

    @property
    def text(self) -> str:
        return _traced(self.folder.load(self.name).text)


@dataclass
class ScriptFaults:
    """Checks calls of scripts. `problems` has one line for each fault after which something was half written."""

    client: redis.Redis
    problems: list[str] = field(default_factory=list)
    writing: dict[tuple[ScriptFolder, str], Case] = field(default_factory=dict)
    """The newest call of each script that wrote something."""
    _checked: set[Any] = field(default_factory=set)
    _loaded: dict[str, str] = field(default_factory=dict)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Check every call of a script that this process makes from now on, before it is made."""
        call_script, take, append = ScriptFolder.call, GroupPayloads.take, GroupPayloads.append

        async def checked_call(folder: ScriptFolder, client: Any, prefix: str, name: str, *arguments: Any) -> Any:
            self.check(folder, name, prefix, arguments)
            return await call_script(folder, client, prefix, name, *arguments)

        async def checked_take(payloads: GroupPayloads, *arguments: Any) -> Any:
            self.check(QUEUE, "take", payloads.keys.prefix, arguments)
            return await take(payloads, *arguments)

        async def checked_append(payloads: GroupPayloads, groups: Sequence[Any], config: Any) -> Any:
            limits = (config.capacity_bytes, config.take_order)
            set_payloads, run = payloads._transaction(groups, limits, ("EVALSHA", ""))
            before = self._save()
            self.client.execute_command(*set_payloads)
            self.check(QUEUE, "append", payloads.keys.prefix, run[4:])
            self.restore(before)
            return await append(payloads, groups, config)

        monkeypatch.setattr(ScriptFolder, "call", checked_call)
        monkeypatch.setattr(GroupPayloads, "take", checked_take)
        monkeypatch.setattr(GroupPayloads, "append", checked_append)

    def check(self, folder: ScriptFolder, name: str, prefix: str, arguments: tuple[Any, ...]) -> None:
        """Run a script under every fault, unless it was checked with the same calls before. The state is kept."""
        seconds = cast("tuple[int, int]", self.client.time())[0] + 1
        case = Case(folder, name, prefix, arguments, self._save(), self.read_state(), seconds)
        self.client.evalsha(self._load(COPY_ALL), 0, LIVE, KEPT)
        done = self._run(case)
        written = self.read_state()
        changes = written != case.state
        self._checked.add((folder, name))
        shape = (name, *((call.command, *map(_family, call.keys)) for call in done.calls))
        if done.error:
            self._report(case, f"answered {done.error!r} and wrote", not changes)
        elif shape not in self._checked:
            self._checked.add(shape)
            if changes:
                self.writing[folder, name] = replace(case, num_calls=len(done.calls))
            first_write = self._fail_at_each_call(case, done)
            self._find_late_keys(case, done.calls, first_write)
            self._find_late_numbers(case, done.calls, first_write)
            if changes:
                self._find_late_checks(case, done.checks, first_write)
            self._fill_redis(case, written)
            self._change_types(case, done, written)
            self._break_values(case, done)
        self.client.evalsha(self._load(COPY_ALL), 0, KEPT, LIVE)

    @property
    def unchecked(self) -> set[str]:
        return {f"{folder.package}: {name}" for folder, name in script_names() - self._checked}

    def _fail_at_each_call(self, case: Case, done: Run) -> int:
        """Inject an error at each call up to the first one that changes something. Returns the number of that call."""
        for number in range(1, len(done.calls) + 1):
            failed = self._run(case, fail_at=number)
            assert "injected" in failed.error, (case.name, failed.error)
            if not self._is_undone(failed):
                return number - 1
        return len(done.calls)

    def _find_late_keys(self, case: Case, calls: Sequence[Call], first_write: int) -> None:
        early = {(key, call.kind) for call in calls[:first_write] for key in call.keys}
        for call in calls[first_write:]:
            late = [] if call.kind == "any" else [key for key in call.keys if (key, call.kind) not in early]
            self._report(case, f"{call.command} {late} was not checked before the first write", not late)

    def _find_late_numbers(self, case: Case, calls: Sequence[Call], first_write: int) -> None:
        known: set[tuple[bytes, bytes]] = set()
        counters = case.state.get(f"{case.prefix}counters".encode(), ("", 0, {}))[2]
        newest_id = int(counters.get(b"next_prompt_id", 0))
        for number, call in enumerate(calls):
            if call.kind != "hash":
                continue
            [key] = call.keys
            names = case.state.get(key, ("", 0, {}))[2] if call.fields is None else call.fields
            fields = {(key, name) for name in names if not (name.isdigit() and int(name) > newest_id)}
            if "INCR" in call.command and number >= first_write:
                text = f"{call.command} {fields - known} was not read before the first write"
                self._report(case, text, fields <= known)
            if number < first_write or call.command in ("HSET", "HDEL"):
                known |= fields

    def _find_late_checks(self, case: Case, checks: Sequence[tuple[int, str]], first_write: int) -> None:
        early = {what for num_calls, what in checks if num_calls < first_write}
        for what in {what for num_calls, what in checks if num_calls >= first_write} - early:
            self._report(case, f"the check {what!r} was first reached after the first write", is_whole=False)

    def _fill_redis(self, case: Case, written: State) -> None:
        """Without memory, Redis refuses a script before its first write, or runs it to its end."""
        full = self._run(case, ("CONFIG", "SET", "maxmemory", 1))
        self.client.config_set("maxmemory", 0)
        is_whole = self.read_state() == (case.state if full.error else written)
        self._report(case, f"without memory: {full.error or 'success'}, but half was written", is_whole)

    def _change_types(self, case: Case, done: Run, written: State) -> None:
        kinds: dict[bytes, set[str]] = {}
        for call in done.calls:
            for key in call.keys:
                kinds.setdefault(key, set()).add(call.kind)
        for key, right in kinds.items():
            for wrong, (command, *value) in WRONG.items():
                if wrong in right:
                    continue
                faulty = self._run(case, ("UNLINK", key), (command, key, *value))
                is_whole = faulty.after == faulty.before
                if not is_whole and not faulty.error:
                    is_whole = _without(self.read_state(), key) == _without(written, key)
                is_whole = is_whole or self._is_undone(faulty)
                self._report(case, f"{key!r} as {wrong}: {faulty.error or 'success'}, but half was written", is_whole)

    def _break_values(self, case: Case, done: Run) -> None:
        places: dict[tuple[bytes, bytes], tuple[Any, ...]] = {}
        for call in done.calls:
            for key in call.keys:
                kind, _, contents = case.state.get(key, ("", 0, {}))
                if kind == "hash" and call.kind == "hash":
                    for name in set(contents) & set(contents if call.fields is None else call.fields):
                        places[key, name] = ("HSET", key, name)
                elif kind == "string" and call.command == "GET":
                    places[key, b""] = ("SET", key)
        for (key, name), put in places.items():
            for value in BROKEN:
                faulty = self._run(case, (*put, value))
                is_whole = not faulty.error or self._is_undone(faulty)
                self._report(case, f"{key!r} {name!r} is {value!r}: {faulty.error}, but half was written", is_whole)

    def _report(self, case: Case, problem: str, is_whole: bool) -> None:
        if not is_whole:
            self.problems.append(f"{case.name}: {problem}")

    def _run(self, case: Case, *broken: tuple[Any, ...], fail_at: int = 0) -> Run:
        """Run a script from the state that `check` was called in, after the commands that break something in it."""
        pipeline = self._begin(broken)
        pipeline.evalsha(self._load(DUMPS), 0)
        text, *arguments = case.words(fail_at=fail_at)
        pipeline.evalsha(self._load(text), *arguments)
        pipeline.evalsha(self._load(DUMPS), 0)
        *others, before, answer, after = pipeline.execute(raise_on_error=False)
        for other in (*others, before, after):
            if isinstance(other, Exception):
                raise other
        if isinstance(answer, ResponseError):
            return Run(str(answer), (), broken, before, after)
        calls = tuple(Call(command.decode(), tuple(arguments)) for command, *arguments in answer[0])
        split = [check.decode(errors="replace").split(" ", 1) for check in answer[1]]
        checks = tuple((int(num_calls), what) for num_calls, what in split)
        return Run("", calls, broken, before, after, checks)

    def _begin(self, broken: tuple[tuple[Any, ...], ...]) -> Any:
        """A pipeline that restores the state that `check` was called in, and breaks something in it."""
        pipeline = self.client.pipeline(transaction=False)
        pipeline.evalsha(self._load(COPY_ALL), 0, KEPT, LIVE)
        for command in broken:
            pipeline.execute_command(*command)
        return pipeline

    def _is_undone(self, run: Run) -> bool:
        """Whether the newest run left the state as it was before the script."""
        if run.after == run.before:
            return True
        after = self.read_state()
        self._begin(run.broken).execute()
        return self.read_state() == after

    def _load(self, text: str) -> str:
        """The digest of a script that this Redis knows. To send long scripts with each of many runs takes longer."""
        if text not in self._loaded:
            self._loaded[text] = str(self.client.script_load(text))
        return self._loaded[text]

    def _save(self) -> tuple[tuple[bytes, int, bytes], ...]:
        keys = cast("list[bytes]", self.client.keys())
        pipeline = self.client.pipeline(transaction=False)
        for key in keys:
            pipeline.pttl(key)
            pipeline.dump(key)
        found = pipeline.execute()
        return tuple(zip(keys, found[::2], found[1::2], strict=True))

    def restore(self, dump: Sequence[tuple[bytes, int, bytes]]) -> None:
        pipeline = self.client.pipeline(transaction=False)
        pipeline.flushdb()
        for key, ttl_ms, value in dump:
            pipeline.restore(key, max(0, ttl_ms), value)
        pipeline.execute()

    def read_state(self) -> State:
        """All keys, each with its type, whether it expires, and its contents."""
        found = cast("list[Any]", self.client.eval(READ_STATE, 0))
        return {key: (kind.decode(), expires, _sorted(kind, value)) for key, kind, expires, value in found}


@cache
def _traced(text: str) -> str:
    """The script in TRACED, with checks that report that they are reached."""
    assert "pcall" not in text, f"a script catches errors: {text}"
    return TRACED % _with_reached_checks(text)


def _with_reached_checks(text: str) -> str:
    """The script, but every condition of an error() and every decoding reports that it is reached, and on what."""
    place = r"error\((\w+ \.\. ' ' \.\. [\w\[\]]+)"
    text, num_ifs = re.subn(rf"\bif (.*) then {place}", r"if reached('error ' .. \2) or \1 then error(\2", text)
    text, num_ors = re.subn(
        rf"(return|=) (.*) or {place}", r"\1 not reached('error ' .. \3) and (\2) or error(\3", text
    )
    assert num_ifs + num_ors == len(re.findall(r"\berror\(", text)), f"an error() of another form: {text}"
    return re.sub(r"cjson\.decode\(([^()]+)\)", r"(reached('decode ' .. (\1)) or cjson.decode(\1))", text)


def _sorted(kind: bytes, value: Any) -> Any:
    if kind in (b"hash", b"zset"):
        return dict(zip(value[::2], value[1::2], strict=True))
    return set(value) if kind == b"set" else value


def _family(key: bytes) -> bytes:
    """The name of a key without ids."""
    return key.split(b":")[2]


def _without(state: State, key: bytes) -> State:
    return {other: value for other, value in state.items() if other != key}
