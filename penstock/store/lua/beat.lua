-- ARGV: part of the run. Records that it is alive. Returns the ms since its last beat, or -1 if there was none.
run_when_full()
local now, last = now_ms(), redis.call('HGET', HEARTBEATS, ARGV[1])
redis.call('HSET', HEARTBEATS, ARGV[1], now)
return last and now - last or -1
