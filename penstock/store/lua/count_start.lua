-- ARGV: part of the run. Returns how often it was started.
run_when_full()
return redis.call('HINCRBY', STARTS, ARGV[1], 1)
