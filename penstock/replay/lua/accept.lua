-- ARGV: key, the key's seconds to live, origin, lease ms, loss window ms, then number, encoded prompt and priority of
-- each group. Submits each prompt and leases it to the origin in one step. It does not ask for admission, because the
-- group is finished already. Returns rows of prompt_id and attempt, or no rows while Redis may still lose the new ids:
-- then call again. Attempt 0: an earlier call brought the group, and nothing is left to do. A number whose call died
-- before the append is leased again, unless a rollout server has it by now.
local imported, server, now = IMPORTED .. ARGV[1], ARGV[3], now_ms()
local expiry, RESERVED = now + tonumber(ARGV[4]), ' reserved'
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

-- An id is reserved for a row first. The prompt is stored only once Redis can no longer lose the id.
local known, ids, is_reserved, newest = {}, {}, {}, 0
numbers(COUNTERS, 'next_prompt_id', 'durable_id', 'awaited_id', 'awaited_ms')
for i = 6, #ARGV, 3 do
  local entry = redis.call('HGET', imported, ARGV[i]) or '0'
  known[#known + 1] = string.match(entry, '^%d+') or error(imported .. ' ' .. ARGV[i] .. ' is not an entry: ' .. entry)
end
check_prompts(known, '')
for i = 6, #ARGV, 3 do
  local entry = redis.call('HGET', imported, ARGV[i])
  if not entry then
    entry = redis.call('HINCRBY', COUNTERS, 'next_prompt_id', 1) .. RESERVED
    redis.call('HSET', imported, ARGV[i], entry)
  end
  ids[i] = string.match(entry, '^%d+')
  is_reserved[i] = entry == ids[i] .. RESERVED
  if is_reserved[i] then newest = math.max(newest, tonumber(ids[i])) end
end
redis.call('EXPIRE', imported, ARGV[2])
local COLUMNS = {'prompt_id', 'attempt'}
local durable_id, _, changed = newest_durable_id(now, tonumber(ARGV[5]))
call_many('HSET', COUNTERS, changed)
if newest > durable_id then return rows(COLUMNS, {}) end

local leased = {}
for i = 6, #ARGV, 3 do
  local id, attempt = ids[i], 0
  if is_reserved[i] then
    redis.call('HSET', PROMPTS, id, ARGV[i + 1])
    if ARGV[i + 2] ~= '0' then redis.call('HSET', PRIORITIES, id, ARGV[i + 2]) end
    redis.call('HSET', imported, ARGV[i], id)
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
return rows(COLUMNS, leased)
