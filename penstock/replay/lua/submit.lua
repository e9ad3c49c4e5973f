-- ARGV: idempotency key, key's seconds to live, then payload and priority of each prompt. Returns {first id, count, replayed}.
local idempotency = P .. 'idempotency:' .. ARGV[1]
if ARGV[1] ~= '' then
  local seen = redis.call('HMGET', idempotency, 'first', 'count')
  if seen[1] then return {tonumber(seen[1]), tonumber(seen[2]), 1} end
end
local n = (#ARGV - 2) / 2
local first = redis.call('HINCRBY', COUNTERS, 'next_prompt_id', n) - n + 1
for i = 0, n - 1 do
  local id = first + i
  redis.call('HSET', PROMPTS, id, ARGV[3 + 2 * i])
  if ARGV[4 + 2 * i] ~= '0' then redis.call('HSET', P .. 'priorities', id, ARGV[4 + 2 * i]) end
  make_pending(id)
end
if ARGV[1] ~= '' then
  redis.call('HSET', idempotency, 'first', first, 'count', n)
  redis.call('EXPIRE', idempotency, ARGV[2])
end
return {first, n, 0}
