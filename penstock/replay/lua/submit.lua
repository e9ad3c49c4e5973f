-- ARGV: keys' seconds to live, then for each submission its idempotency key, its number of prompts, and payload and
-- priority of each. Returns {first id, count, replayed} of each, in one list.
local answers, place = {}, 2
while place <= #ARGV do
  local key, n = ARGV[place], tonumber(ARGV[place + 1])
  local idempotency = P .. 'idempotency:' .. key
  local seen = key ~= '' and redis.call('HMGET', idempotency, 'first', 'count') or {}
  local first, count, replayed = tonumber(seen[1] or nil), tonumber(seen[2] or nil), 1
  if not first then
    first, count, replayed = add_prompts(place + 2, n), n, 0
    if key ~= '' then
      redis.call('HSET', idempotency, 'first', first, 'count', n)
      redis.call('EXPIRE', idempotency, ARGV[1])
    end
  end
  for _, part in ipairs({first, count, replayed}) do answers[#answers + 1] = part end
  place = place + 2 + 2 * n
end
return answers
