-- ARGV: how many sessions to skip, largest number. Returns rows of the sessions that have calls, the one with the
-- newest call first. Sessions that have their reward come before all others, because they do not expire.
local values = {}
for _, session in ipairs(redis.call('ZRANGE', SESSIONS, ARGV[1], ARGV[1] + ARGV[2] - 1, 'REV')) do add_summary(values, session) end
return {SUMMARY, values}
