-- ARGV: policy version. Holds the servers at it and counts a roll back; repeating the call changes nothing.
if redis.call('HGET', COUNTERS, 'held_version') ~= ARGV[1] then
  numbers(COUNTERS, 'roll_backs')
  redis.call('HSET', COUNTERS, 'held_version', ARGV[1], 'roll_back_version', ARGV[1])
  redis.call('HINCRBY', COUNTERS, 'roll_backs', 1)
end
return 1
