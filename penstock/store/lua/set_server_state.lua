-- ARGV: state, the publisher's term (empty: the server moves itself), servers. A publisher moves no server that has
-- left. Returns how many servers have the state now.
if ARGV[2] ~= '' then
  local fenced = check_term(ARGV[2])
  if fenced then return fenced end
end
run_when_full()
numbers(COUNTERS, 'fleet_changes')
local num_set = 0
for i = 3, #ARGV do
  if ARGV[2] == '' or redis.call('HEXISTS', SERVERS, ARGV[i]) == 1 then
    redis.call('HSET', SERVER_STATES, ARGV[i], ARGV[1])
    num_set = num_set + 1
  end
end
if num_set > 0 then note_fleet_change() end
return num_set
