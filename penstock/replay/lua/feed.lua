-- ARGV: feed, fingerprint, position, then payload and priority of each prompt. If the feed stands at this position and
-- has this fingerprint, adds the prompts and moves the position on in one step; otherwise adds nothing.
-- Returns position and fingerprint of the feed after the call.
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
return {'position', stored, 'fingerprint', fingerprint}
