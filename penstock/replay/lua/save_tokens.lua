-- ARGV: server, bytes of saved tokens at most, then id, attempt, sample, start and encoded tokens of each piece. Saves
-- tokens of prompts that the server has leased. Returns the prompts of the pieces that were refused: the lease is lost,
-- the server is in quarantine, or there is no room.
local server, max_bytes, refused = ARGV[1], tonumber(ARGV[2]), {}
local is_quarantined = redis.call('HEXISTS', QUARANTINED, server) == 1
local total, lengths, bytes_of, pieces = counter('saved_bytes'), {}, {}, {}
for i = 3, #ARGV, 5 do
  local id, field, payload = ARGV[i], ARGV[i + 2] .. ':' .. ARGV[i + 3], ARGV[i + 4]
  local is_owner = redis.call('HGET', OWNERS, id) == server .. '/' .. ARGV[i + 1]
  -- The value begins with the field, because rollout servers may read values only.
  local value, added, place = field .. ':' .. payload, #payload, id .. '/' .. field
  local replaced = lengths[place] or redis.call('HSTRLEN', SAVED .. id, field)
  if replaced > 0 then added = #value - replaced end
  if is_quarantined or not is_owner or total + added > max_bytes then
    table.insert(refused, tonumber(id))
  else
    table.insert(pieces, {SAVED .. id, field, value})
    bytes_of[id] = (bytes_of[id] or numbers(SAVED_BYTES, id)) + added
    total, lengths[place] = total + added, #value
  end
end
for _, piece in ipairs(pieces) do redis.call('HSET', piece[1], piece[2], piece[3], 'from:' .. server, '') end
for id, num_bytes in pairs(bytes_of) do redis.call('HSET', SAVED_BYTES, id, num_bytes) end
redis.call('HSET', COUNTERS, 'saved_bytes', total)
return refused
