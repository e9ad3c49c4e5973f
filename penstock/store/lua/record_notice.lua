-- ARGV: kind and fingerprint, the notice without its counts, number of new events, largest number of notices. Adds the
-- events to the notice, or does nothing if it would be one notice too many.
run_when_full()
local now, text = now_ms(), redis.call('HGET', NOTICES, ARGV[1])
if not text and redis.call('HLEN', NOTICES) >= tonumber(ARGV[4]) then return 0 end
local notice = cjson.decode(text or ARGV[2])
notice.count, notice.first_at_ms, notice.last_at_ms = (notice.count or 0) + ARGV[3], notice.first_at_ms or now, now
redis.call('HSET', NOTICES, ARGV[1], cjson.encode(notice))
return 1
