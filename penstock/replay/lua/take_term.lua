-- ARGV: a term that the new one must exceed. Returns the new term.
run_when_full()
local term = math.max(counter('term'), tonumber(ARGV[1])) + 1
redis.call('HSET', COUNTERS, 'term', term)
return term
