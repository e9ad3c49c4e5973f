-- ARGV: feed, fingerprint, position, then payload and priority of each prompt. Adds them where the feed stands at this
-- position, and moves it on with the same step; adds nothing where it stands elsewhere or is of other data.
-- Returns {position, fingerprint} of the feed, as they are afterwards.
local name, position = ARGV[1], tonumber(ARGV[3])
local stored = tonumber(redis.call('HGET', FEEDS, name) or '0')
local fingerprint = redis.call('HGET', FEEDS, name .. ':fingerprint') or ARGV[2]
if #ARGV > 3 and stored == position and fingerprint == ARGV[2] then
  local places = {}
  for place = 4, #ARGV, 2 do places[#places + 1] = place end
  add_prompts(places)
  stored = position + #places
  redis.call('HSET', FEEDS, name, stored, name .. ':fingerprint', fingerprint)
end
return {stored, fingerprint}
