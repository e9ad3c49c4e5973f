-- Shared by all scripts. Time is Redis' own, so no two clocks are ever compared.
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function counter(name)
  return tonumber(redis.call('HGET', COUNTERS, name) or '0')
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
  if redis.call('EXISTS', SAVED_BYTES) == 0 then return end
  for _, id in ipairs(ids) do drop_saved(id) end
end

-- Notes that servers joined, left or changed their state or version: see penstock/store/fleet.py.
local function note_fleet_change()
  count('fleet_changes', 1)
end

local function forget_server(server)
  for _, key in ipairs({SERVERS, SERVER_STATES, BREAKERS, QUARANTINED}) do redis.call('HDEL', key, server) end
  note_fleet_change()
end
