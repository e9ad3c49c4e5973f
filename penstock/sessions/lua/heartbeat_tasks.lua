-- ARGV: lease ms, owner, whether it sees all, then sessions. Renews their leases. Returns the sessions whose lease is lost:
-- the place was rewarded, given to another worker, or its task has ended. The lease of another owner's session counts as
-- lost.
run_when_full()
local expiry, held, lost = now_ms() + ARGV[1], {}, {}
for i = 4, #ARGV do
  local task, place
  if may_use_session(ARGV[i], ARGV[2], ARGV[3]) then task, place = leased_place_of(ARGV[i]) end
  if task then held[#held + 1] = member(task, place) else lost[#lost + 1] = ARGV[i] end
end
for _, name in ipairs(held) do redis.call('ZADD', TASK_LEASES, expiry, name) end
return lost
