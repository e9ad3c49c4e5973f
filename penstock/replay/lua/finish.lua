-- ARGV: term, step. Records that no step follows this one.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
redis.call('HSET', COUNTERS, 'finished_step', ARGV[2])
return 1
