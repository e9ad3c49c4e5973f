-- ARGV: policy version. Holds the servers at it and counts an order to rewind; repeating the call changes nothing.
if redis.call('HGET', COUNTERS, 'held_version') ~= ARGV[1] then
  numbers(COUNTERS, 'num_rewinds')
  redis.call('HSET', COUNTERS, 'held_version', ARGV[1], 'rewind_version', ARGV[1])
  redis.call('HINCRBY', COUNTERS, 'num_rewinds', 1)
end
return 1
