-- ARGV: largest number of failures of a place, seconds to live, retry ms. Returns the places of dead workers to the
-- queue, and completes tasks whose deadline has passed with the sessions that they have. Returns both numbers. Also
-- forgets sessions that have expired. It does so little at once that the queue does not stall: other calls may never come.
run_when_full()
local now = now_ms()
local silent, expired, due, num_places = expired_sessions(now, 500), expired_places(now), {}, 0
for _, task in ipairs(redis.call('ZRANGE', TASK_DUE, '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)) do
  if num_places >= MAX_COMPLETED then break end
  num_places = num_places + check_task(task, math.huge)
  due[#due + 1] = task
end

for _, session in ipairs(silent) do forget_calls(session) end
local num_reclaimed, num_due = reclaim_places(expired, now, ARGV[1], ARGV[2], ARGV[3]), 0
for _, task in ipairs(due) do
  if redis.call('ZSCORE', TASK_DUE, task) then
    complete(task, now, ARGV[2], 0)
    num_due = num_due + 1
  end
end
return {num_reclaimed, num_due}
