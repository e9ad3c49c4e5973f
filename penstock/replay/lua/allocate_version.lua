-- ARGV: term, the least version. Versions only ever grow, whatever a checkpoint says.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
local version = math.max(counter('allocated_version') + 1, tonumber(ARGV[2]))
redis.call('HSET', COUNTERS, 'allocated_version', version)
return version
