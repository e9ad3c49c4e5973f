-- ARGV: server, state, the publisher's term (empty: the server moves itself). A publisher moves no server that has
-- left. Returns 1 if the state is set.
if ARGV[3] ~= '' then
  local fenced = check_term(ARGV[3])
  if fenced then return fenced end
  if redis.call('HEXISTS', SERVERS, ARGV[1]) == 0 then return 0 end
end
run_when_full()
redis.call('HSET', SERVER_STATES, ARGV[1], ARGV[2])
return 1
