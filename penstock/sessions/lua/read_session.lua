-- ARGV: session. Returns its summary as rows, and its calls.
local values = {}
add_summary(values, ARGV[1])
return {{SUMMARY, values}, redis.call('LRANGE', calls_key(ARGV[1]), 0, -1)}
