-- ARGV: server, its record. Stores the record and returns the server's state, or false once it has none.
run_when_full()
redis.call('HSET', SERVERS, ARGV[1], ARGV[2])
return redis.call('HGET', SERVER_STATES, ARGV[1])
