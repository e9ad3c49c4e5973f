-- ARGV: server, max prompts, ttl ms, groups per step, max staleness, capacity bytes, max attempts.
-- Returns {id, attempt, payload, id, ...}.
local server, wanted, now = ARGV[1], tonumber(ARGV[2]), now_ms()
local expiry = now + tonumber(ARGV[3])

for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, 256)) do
  count('reclaimed', 1)
  return_prompt(id, 'lease_expired', tonumber(ARGV[7]))
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', EVAL_LEASES, '-inf', now, 'LIMIT', 0, 256)) do
  redis.call('ZREM', EVAL_LEASES, id)
  redis.call('HDEL', OWNERS, id)
  redis.call('ZADD', EVAL_PENDING, id, id)
end

local leased = {}
local function grant(id, leases)
  local attempt = redis.call('HINCRBY', ATTEMPTS, id, 1)
  redis.call('ZADD', leases, expiry, id)
  redis.call('HSET', OWNERS, id, server .. '/' .. attempt)
  table.insert(leased, tonumber(id))
  table.insert(leased, attempt)
  table.insert(leased, redis.call('HGET', PROMPTS, id))
end

local evals = redis.call('ZPOPMIN', EVAL_PENDING, wanted)
for i = 1, #evals, 2 do grant(evals[i], EVAL_LEASES) end

local limit = (tonumber(ARGV[5]) + counter('step') + 1) * tonumber(ARGV[4])
local room = limit - (counter('trained') + queued() + in_flight())
-- A returned prompt holds its place in in_flight already, so it needs no room.
local budget = wanted - #evals / 2
if counter('queued_bytes') >= tonumber(ARGV[6]) then budget = 0 end
while budget > 0 do
  local next = redis.call('ZRANGE', PENDING, 0, 0)[1]
  if not next then break end
  if redis.call('SREM', RETURNED, next) == 0 then
    if room <= 0 then break end
    room = room - 1
    count('admitted', 1)
  end
  redis.call('ZREM', PENDING, next)
  grant(next, LEASES)
  budget = budget - 1
end
return leased
