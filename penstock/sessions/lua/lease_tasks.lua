-- ARGV: worker, largest number of places, lease ms, largest number of open tasks, largest number of failures of a place,
-- seconds to live, retry ms. Leases places in the order of submission. Places of open tasks are leased in any case, those
-- of other tasks while fewer than the largest number are open. Returns rows of the leased places.
local worker, now, leased = ARGV[1], now_ms(), {}
reclaim_places(now, ARGV[5], ARGV[6], ARGV[7])
local COLUMNS = {'task_id', 'session_id', 'attempt', 'payload'}
for _, name in ipairs(redis.call('ZRANGE', TASK_PENDING, 0, 511)) do
  if #leased >= 4 * tonumber(ARGV[2]) then break end
  local task, place = string.match(name, '^(.+) (%d+)$')
  local key = task_key(task)
  local is_open = redis.call('HGET', key, 'state') == 'open'
  if is_open or redis.call('SCARD', TASK_OPEN) < tonumber(ARGV[4]) then
    if not is_open then begin_task(task, now) end
    local attempt = redis.call('HINCRBY', key, 'attempts:' .. place, 1)
    local session = task .. '.' .. place .. '.' .. attempt
    redis.call('HSET', key, 'owner:' .. place, worker)
    redis.call('ZREM', TASK_PENDING, name)
    redis.call('ZADD', TASK_LEASES, now + ARGV[3], name)
    for _, value in ipairs({task, session, attempt, redis.call('HGET', key, 'payload')}) do leased[#leased + 1] = value end
  end
end
return {COLUMNS, leased}
