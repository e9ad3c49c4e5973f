-- ARGV: kind and fingerprint, the notice without its counts, number of new events, largest number of notices of a kind,
-- how long a notice of this kind is shown in milliseconds (0: forever).
-- Adds the events to the notice, or does nothing if it would be one notice too many. Removes notices that are no longer shown.
run_when_full()
local now, shown_ms, text = now_ms(), tonumber(ARGV[5]), redis.call('HGET', NOTICES, ARGV[1])
local notice, num_of_kind, outdated = cjson.decode(text or ARGV[2]), 0, {}
if not text then
  for _, other in ipairs(redis.call('HVALS', NOTICES)) do
    local known = cjson.decode(other)
    if known.kind == notice.kind and shown_ms > 0 and known.key and known.last_at_ms < now - shown_ms then
      outdated[#outdated + 1] = known.key
    elseif known.kind == notice.kind then
      num_of_kind = num_of_kind + 1
    end
  end
  for _, key in ipairs(outdated) do redis.call('HDEL', NOTICES, key) end
  if num_of_kind >= tonumber(ARGV[4]) then return 0 end
elseif shown_ms > 0 and notice.last_at_ms < now - shown_ms then
  notice = cjson.decode(ARGV[2])
end
notice.count, notice.first_at_ms, notice.last_at_ms = (notice.count or 0) + ARGV[3], notice.first_at_ms or now, now
redis.call('HSET', NOTICES, ARGV[1], cjson.encode(notice))
return 1
