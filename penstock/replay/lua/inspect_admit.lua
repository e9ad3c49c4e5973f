-- ARGV: import key, key's seconds to live, server, lease ms, then row, encoded prompt and priority of each group.
-- Submits each row and leases it to the server in one step, past admission: its group is finished already.
-- Returns {prompt id, attempt, ...}. Attempt 0: an earlier import brought the row, nothing is left to do. A row whose
-- import died between this and its append is leased again, unless a rollout server has it by now.
local rows, server, expiry = P .. 'idempotency:' .. ARGV[1], ARGV[3], now_ms() + tonumber(ARGV[4])
local function grant(id)
  local attempt = redis.call('HINCRBY', ATTEMPTS, id, 1)
  redis.call('ZADD', LEASES, expiry, id)
  redis.call('HSET', OWNERS, id, server .. '/' .. attempt)
  return attempt
end
local function is_ours(id)
  local owner = redis.call('HGET', OWNERS, id)
  return owner and string.match(owner, '^(.*)/%d+$') == server
end

local leased = {}
for i = 5, #ARGV, 3 do
  local id, attempt = redis.call('HGET', rows, ARGV[i]), 0
  if not id then
    id = redis.call('HINCRBY', COUNTERS, 'next_prompt_id', 1)
    redis.call('HSET', PROMPTS, id, ARGV[i + 1])
    if ARGV[i + 2] ~= '0' then redis.call('HSET', P .. 'priorities', id, ARGV[i + 2]) end
    redis.call('HSET', rows, ARGV[i], id)
    count('admitted', 1)
    redis.call('ZADD', OPEN, next_admission(), id)
    attempt = grant(id)
  elseif is_ours(id) or redis.call('SREM', RETURNED, id) == 1 then
    redis.call('ZREM', PENDING, id)
    attempt = grant(id)
  end
  table.insert(leased, tonumber(id))
  table.insert(leased, attempt)
end
redis.call('EXPIRE', rows, ARGV[2])
return leased
