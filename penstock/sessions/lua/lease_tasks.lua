-- ARGV: worker, largest number of places, lease ms, largest number of open tasks, largest number of failures of a place,
-- seconds to live, retry ms. Leases places in the order of submission. Places of open tasks are leased in any case, those
-- of other tasks while fewer than the largest number are open. Returns rows of the leased places.
local worker, now, leased = ARGV[1], now_ms(), {}
local COLUMNS = {'task_id', 'session_id', 'attempt', 'payload'}

-- Chooses places, and tasks that begin with them. Fails if they could not be leased.
local function choose_places(max_places, max_open)
  local places, is_begun, begun = {}, {}, {}
  local num_open = redis.call('SCARD', TASK_OPEN)
  for _, name in ipairs(redis.call('ZRANGE', TASK_PENDING, 0, 511)) do
    if #places >= max_places then break end
    local task, place = string.match(name, '^(.+) (%d+)$')
    local is_open = is_begun[task] or redis.call('HGET', task_key(task), 'state') == 'open'
    if is_open or num_open + #begun < max_open then
      if not is_open then begun[#begun + 1], is_begun[task] = task, true end
      places[#places + 1] = {task, place, (numbers(task_key(task), 'attempts:' .. place, 'deadline_ms'))}
    end
  end
  check('ZCARD', TASK_DUE, TASK_LEASES)
  return places, begun
end

local expired = expired_places(now)
if #expired > 0 then
  choose_places(512, math.huge)
  reclaim_places(expired, now, ARGV[5], ARGV[6], ARGV[7])
end
local places, begun = choose_places(tonumber(ARGV[2]), tonumber(ARGV[4]))
for _, task in ipairs(begun) do begin_task(task, now) end
for _, chosen in ipairs(places) do
  local task, place, attempt = chosen[1], chosen[2], chosen[3] + 1
  local key, session = task_key(task), task .. '.' .. place .. '.' .. attempt
  redis.call('HSET', key, 'attempts:' .. place, attempt, 'owner:' .. place, worker)
  redis.call('ZREM', TASK_PENDING, member(task, place))
  redis.call('ZADD', TASK_LEASES, now + ARGV[3], member(task, place))
  for _, value in ipairs({task, session, attempt, redis.call('HGET', key, 'payload')}) do leased[#leased + 1] = value end
end
return {COLUMNS, leased}
