-- ARGV: kind and fingerprint, the notice without its counts, number of new events, largest number of notices of a kind.
-- Adds the events to the notice, or does nothing if it would be one notice too many.
run_when_full()
local now, text = now_ms(), redis.call('HGET', NOTICES, ARGV[1])
local notice, num_of_kind = cjson.decode(text or ARGV[2]), 0
if not text then
  for _, other in ipairs(redis.call('HVALS', NOTICES)) do
    if cjson.decode(other).kind == notice.kind then num_of_kind = num_of_kind + 1 end
  end
  if num_of_kind >= tonumber(ARGV[4]) then return 0 end
end
notice.count, notice.first_at_ms, notice.last_at_ms = (notice.count or 0) + ARGV[3], notice.first_at_ms or now, now
redis.call('HSET', NOTICES, ARGV[1], cjson.encode(notice))
return 1
