-- ARGV: largest number of failures of a place, seconds to live, retry ms. Returns the places of dead workers to the
-- queue, and completes tasks whose deadline has passed with the sessions that they have. Returns both numbers. Also
-- forgets sessions that have expired, few enough not to stall the queue: other calls may never come.
run_when_full()
local now = now_ms()
forget_expired(now, 500)
local num_reclaimed = reclaim_places(now, ARGV[1], ARGV[2], ARGV[3])
local due = redis.call('ZRANGE', TASK_DUE, '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)
for _, task in ipairs(due) do complete(task, now, ARGV[2], 0) end
return {num_reclaimed, #due}
