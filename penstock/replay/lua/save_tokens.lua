-- ARGV: server, bytes of saved tokens at most, then id, attempt, sample, start and encoded tokens of each piece. Saves
-- tokens of prompts that the server has leased. Returns the prompts of the pieces that were refused: the lease is lost,
-- the server is in quarantine, or there is no room.
local server, max_bytes, refused = ARGV[1], tonumber(ARGV[2]), {}
local is_quarantined = redis.call('HEXISTS', QUARANTINED, server) == 1
local total = counter('saved_bytes')
for i = 3, #ARGV, 5 do
  local id, field, payload = ARGV[i], ARGV[i + 2] .. ':' .. ARGV[i + 3], ARGV[i + 4]
  local is_owner = redis.call('HGET', OWNERS, id) == server .. '/' .. ARGV[i + 1]
  -- The value begins with the field, because rollout servers may read values only.
  local value, added = field .. ':' .. payload, #payload
  local replaced = redis.call('HSTRLEN', SAVED .. id, field)
  if replaced > 0 then added = #value - replaced end
  if is_quarantined or not is_owner or total + added > max_bytes then
    table.insert(refused, tonumber(id))
  else
    redis.call('HSET', SAVED .. id, field, value, 'from:' .. server, '')
    redis.call('HINCRBY', SAVED_BYTES, id, added)
    total = total + added
  end
end
redis.call('HSET', COUNTERS, 'saved_bytes', total)
return refused
