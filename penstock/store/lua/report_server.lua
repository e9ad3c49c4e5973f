-- ARGV: server, its record (a JSON object). Stores the record with the time of this heartbeat. Returns the server's
-- state, or nothing once it has none, the version that the run, or else the server, is held at, and the current version.
run_when_full()
local heartbeat = string.format(', "heartbeat_ms": %.0f}', now_ms())
local VERSION = '"policy_version": (%-?%d+)'
local before = redis.call('HGET', SERVERS, ARGV[1])
local held, current, changes = unpack(redis.call('HMGET', COUNTERS, 'held_version', 'policy_version', 'fleet_changes'))
held = held or redis.call('HGET', POLICY_PINS, ARGV[1])
local state = redis.call('HGET', SERVER_STATES, ARGV[1])
changes = (integer(COUNTERS, 'fleet_changes', changes or '0')) + 1
redis.call('HSET', SERVERS, ARGV[1], string.sub(ARGV[2], 1, -2) .. heartbeat)
if not before or string.match(before, VERSION) ~= string.match(ARGV[2], VERSION) then
  redis.call('HSET', COUNTERS, 'fleet_changes', changes)
end
return {'state', state, 'held_version', held, 'current_version', current}
