-- ARGV: server, id, attempt, failure (empty: none), max attempts. Ends a lease; does nothing if the server lost it
-- already.
run_when_full()
local id = ARGV[2]
if redis.call('HGET', OWNERS, id) ~= ARGV[1] .. '/' .. ARGV[3] then return 0 end
if redis.call('ZSCORE', EVAL_LEASES, id) then
  return_evaluation(id, ARGV[4], tonumber(ARGV[5]))
else
  return_prompt(id, ARGV[4], tonumber(ARGV[5]))
end
return 1
