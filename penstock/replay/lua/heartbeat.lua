-- ARGV: server, ttl ms, then id and attempt of each lease. Renews the leases and returns the ids that the server has
-- lost.
run_when_full()
redis.call('ZCARD', EVAL_LEASES)  -- fails before the first write if it is of another type
local expiry, lost = now_ms() + tonumber(ARGV[2]), {}
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  if redis.call('HGET', OWNERS, id) ~= ARGV[1] .. '/' .. ARGV[i + 1] then
    table.insert(lost, tonumber(id))
  elseif redis.call('ZADD', LEASES, 'XX', 'CH', expiry, id) == 0 and not redis.call('ZSCORE', LEASES, id) then
    redis.call('ZADD', EVAL_LEASES, 'XX', expiry, id)
  end
end
return lost
