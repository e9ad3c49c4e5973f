-- ARGV: a random name. Returns the name of this store: the first name that it was given.
local name = redis.call('HGET', COUNTERS, 'store_id')
if not name then
  run_when_full()
  name = ARGV[1]
  redis.call('HSET', COUNTERS, 'store_id', name)
end
return name
