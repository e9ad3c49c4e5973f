-- ARGV: a term that the new one must exceed. Returns the new term.
run_when_full()
local term = math.max(counter('term'), tonumber(ARGV[1])) + 1
local old_rewinds, num_rewinds = numbers(COUNTERS, 'roll_backs', 'num_rewinds')
redis.call('HSET', COUNTERS, 'term', term)
if old_rewinds > 0 then -- a gateway of an older release has counted these orders
  if num_rewinds == 0 then
    redis.call('HSET', COUNTERS, 'rewind_version', redis.call('HGET', COUNTERS, 'roll_back_version') or '0')
  end
  redis.call('HSET', COUNTERS, 'num_rewinds', num_rewinds + old_rewinds)
  redis.call('HDEL', COUNTERS, 'roll_backs', 'roll_back_version')
end
return term
