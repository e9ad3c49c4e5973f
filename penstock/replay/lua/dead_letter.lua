-- ARGV: term, id, reason. Moves a queued group, with its payload, to the dead letters. Returns 1 if there was one.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
local payload_key = remove_group(ARGV[2])
if not payload_key then return 0 end
local payload = redis.call('GET', payload_key)
redis.call('UNLINK', payload_key)
bury(ARGV[2], ARGV[3], payload)
return 1
