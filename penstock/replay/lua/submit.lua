-- ARGV: idempotency key, key's seconds to live, then payload and priority of each prompt. Returns {first id, count, replayed}.
local idempotency = P .. 'idempotency:' .. ARGV[1]
if ARGV[1] ~= '' then
  local seen = redis.call('HMGET', idempotency, 'first', 'count')
  if seen[1] then return {tonumber(seen[1]), tonumber(seen[2]), 1} end
end
local first, n = add_prompts(3)
if ARGV[1] ~= '' then
  redis.call('HSET', idempotency, 'first', first, 'count', n)
  redis.call('EXPIRE', idempotency, ARGV[2])
end
return {first, n, 0}
