-- ARGV: largest number of failures of a place, seconds to live, retry ms. Returns the places of dead workers to the
-- queue, and completes tasks whose deadline has passed with the sessions that they have. Returns both numbers. Also
-- forgets sessions that have expired, few enough not to stall the queue: other calls may never come.
run_when_full()
local now = now_ms()
local function due_tasks()
  return redis.call('ZRANGE', TASK_DUE, '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)
end
local silent, expired = expired_sessions(now, 500), expired_places(now)
for _, task in ipairs(due_tasks()) do check_task(task) end

for _, session in ipairs(silent) do forget_calls(session) end
local num_reclaimed, due = reclaim_places(expired, now, ARGV[1], ARGV[2], ARGV[3]), due_tasks()
for _, task in ipairs(due) do complete(task, now, ARGV[2], 0) end
return {num_reclaimed, #due}
