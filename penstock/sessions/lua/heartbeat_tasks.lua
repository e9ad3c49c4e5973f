-- ARGV: lease ms, owner, whether it sees all, then sessions. Renews their leases. Returns the sessions whose lease is lost:
-- the place was rewarded, given to another worker, or its task has ended. That of another owner's session counts as lost.
run_when_full()
local now, lost = now_ms(), {}
for i = 4, #ARGV do
  local is_held = may_use_session(ARGV[i], ARGV[2], ARGV[3]) and renew_lease(ARGV[i], now + ARGV[1])
  if not is_held then lost[#lost + 1] = ARGV[i] end
end
return lost
