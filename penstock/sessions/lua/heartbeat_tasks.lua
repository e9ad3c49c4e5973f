-- ARGV: lease ms, then sessions. Renews their leases. Returns the sessions whose lease is lost: the place was rewarded,
-- given to another worker, or its task has ended.
run_when_full()
local expiry, held, lost = now_ms() + ARGV[1], {}, {}
for i = 2, #ARGV do
  local task, place = leased_place_of(ARGV[i])
  if task then held[#held + 1] = member(task, place) else lost[#lost + 1] = ARGV[i] end
end
for _, name in ipairs(held) do redis.call('ZADD', TASK_LEASES, expiry, name) end
return lost
