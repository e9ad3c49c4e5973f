-- ARGV: lease ms, then sessions. Renews their leases. Returns the sessions whose lease is lost: the place was rewarded,
-- given to another worker, or its task has ended.
run_when_full()
local now, lost = now_ms(), {}
for i = 2, #ARGV do
  if not renew_lease(ARGV[i], now + ARGV[1]) then lost[#lost + 1] = ARGV[i] end
end
return lost
