-- ARGV: server, its record (a JSON object). Stores the record with the time of this heartbeat, and returns the server's
-- state, or false once it has none.
run_when_full()
local heartbeat = string.format(', "heartbeat_ms": %.0f}', now_ms())
local is_new = redis.call('HSET', SERVERS, ARGV[1], string.sub(ARGV[2], 1, -2) .. heartbeat) == 1
if is_new then note_fleet_change() end
return redis.call('HGET', SERVER_STATES, ARGV[1])
