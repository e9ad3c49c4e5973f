-- ARGV: ms until they are due again, largest number. Returns sessions and tasks that have their rewards and should be
-- groups by now. The gateway that had begun with them has died, or the queue was full.
run_when_full()
local now = now_ms()
local due = redis.call('ZRANGE', FINISHING, '-inf', now, 'BYSCORE', 'LIMIT', 0, ARGV[2])
for _, name in ipairs(due) do redis.call('ZADD', FINISHING, now + ARGV[1], name) end
return due
