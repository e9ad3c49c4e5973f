-- Shared by all scripts. Redis does not undo what a failed script has written, so each script fails before its first
-- write or not at all: it first reads what it needs, and checks the keys that it writes without having read them.
-- tests/integration/store/test_script_faults.py injects faults. Time is Redis' own, so no two clocks are ever compared.

-- Fails if a key is of another type than `command` reads, which has no other arguments: HLEN, ZCARD, SCARD, LLEN.
local function check(command, ...)
  for i = 1, select('#', ...) do redis.call(command, (select(i, ...))) end
end

-- The same for a stream. It reads an empty range.
local function check_stream(key)
  redis.call('XREVRANGE', key, '+', '+')
end

-- A value of a hash's field as a number. Fails if it is not an integer that HINCRBY takes and Lua counts exactly.
local function integer(key, field, value)
  local number = string.match(value, '^%-?%d+$') and tonumber(value)
  if not number or math.abs(number) > 2 ^ 53 then error(key .. ' ' .. field .. ' is not a whole number: ' .. value) end
  return number
end

-- Fields of a hash as integers; 0 for a missing one. Fails if a value is none.
local function numbers(key, ...)
  local values = redis.call('HMGET', key, ...)
  for i, value in ipairs(values) do values[i] = integer(key, select(i, ...), value or '0') end
  return unpack(values)
end

-- Fails if a field of a hash cannot be added to by HINCRBYFLOAT, as infinity cannot.
local function check_float(key, field)
  local value = redis.call('HGET', key, field)
  local number = tonumber(value or '0')
  if not number or number - number ~= 0 then error(key .. ' ' .. field .. ' is not a number: ' .. value) end
end

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function counter(name)
  return (numbers(COUNTERS, name))
end

local function count(name, by)
  redis.call('HINCRBY', COUNTERS, name, by)
end

-- When Redis is out of memory, it refuses a script whose first write may need memory. A script that starts with a delete
-- runs to its end. Scripts that free memory, or keep leases and servers alive until memory is freed, must run, so they
-- start with this delete of a field that never exists.
local function run_when_full()
  redis.call('HDEL', COUNTERS, '')
end

-- Returns an error, for the script to return, if `term` is not the current one.
local function check_term(term)
  local current = counter('term')
  if tonumber(term) ~= current then
    return redis.error_reply('FENCED term ' .. term .. ' has passed; the current one is ' .. current)
  end
  run_when_full()
end

-- Fails if drop_saved would fail for one of these prompts. Returns whether any prompt has saved tokens.
local function check_saved(ids)
  if redis.call('HLEN', SAVED_BYTES) == 0 then return false end
  numbers(COUNTERS, 'saved_bytes')
  for _, id in ipairs(ids) do numbers(SAVED_BYTES, id) end
  return true
end

-- Deletes the saved tokens of a prompt, if it has some.
local function drop_saved(id)
  local num_bytes = redis.call('HGET', SAVED_BYTES, id)
  if not num_bytes then return end
  redis.call('HDEL', SAVED_BYTES, id)
  redis.call('UNLINK', SAVED .. id)
  count('saved_bytes', -num_bytes)
end

-- The same for many prompts.
local function drop_all_saved(ids)
  if redis.call('HLEN', SAVED_BYTES) == 0 then return end
  for _, id in ipairs(ids) do drop_saved(id) end
end

-- Notes that servers joined, left or changed their state or version: see penstock/store/fleet.py.
local function note_fleet_change()
  count('fleet_changes', 1)
end

local function check_forget_server()
  check('HLEN', SERVERS, SERVER_STATES, BREAKERS, QUARANTINED)
  numbers(COUNTERS, 'fleet_changes')
end

local function forget_server(server)
  for _, key in ipairs({SERVERS, SERVER_STATES, BREAKERS, QUARANTINED}) do redis.call('HDEL', key, server) end
  note_fleet_change()
end
