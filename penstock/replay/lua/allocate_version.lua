-- ARGV: term, lowest acceptable version. Returns a version that was never returned before: versions only grow.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
local version = math.max(counter('allocated_version') + 1, tonumber(ARGV[2]))
redis.call('HSET', COUNTERS, 'allocated_version', version)
return version
