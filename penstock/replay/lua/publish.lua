-- ARGV: term, version, step, encoded policy. Makes the version the current one and records it in the registry.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
redis.call('HSET', COUNTERS, 'policy_version', ARGV[2], 'step', ARGV[3])
redis.call('HSET', P .. 'policies', ARGV[2], ARGV[4])
redis.call('ZADD', P .. 'policy_versions', ARGV[2], ARGV[2])
return 1
