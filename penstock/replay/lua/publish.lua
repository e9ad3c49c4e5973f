-- ARGV: term, version, step, encoded policy. Makes the version the current one and adds it to the registry.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
check('HLEN', POLICIES)
check('ZCARD', POLICY_VERSIONS)
check_stream(LEASE_SIGNALS)
redis.call('HSET', COUNTERS, 'policy_version', ARGV[2], 'step', ARGV[3])
redis.call('HSET', POLICIES, ARGV[2], ARGV[4])
redis.call('ZADD', POLICY_VERSIONS, ARGV[2], ARGV[2])
signal_lease()
return 1
