-- ARGV: the learner's term, server, the record of its quarantine (empty: the quarantine ends). Nothing is stored for a
-- server that has left. Tokens that the server saved are deleted, so that no other server continues them. Returns 1 if
-- the record is set or removed.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
if ARGV[3] == '' then return redis.call('HDEL', QUARANTINED, ARGV[2]) end
if redis.call('HEXISTS', SERVERS, ARGV[2]) == 0 then return 0 end
local dropped = {}
for _, id in ipairs(redis.call('HKEYS', SAVED_BYTES)) do
  if redis.call('HEXISTS', SAVED .. id, 'from:' .. ARGV[2]) == 1 then dropped[#dropped + 1] = id end
end
check_saved(dropped)
check('HLEN', QUARANTINED)
redis.call('HSET', QUARANTINED, ARGV[2], ARGV[3])
drop_all_saved(dropped)
return 1
