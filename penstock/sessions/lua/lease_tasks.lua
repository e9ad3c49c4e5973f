-- ARGV: worker, largest number of places, lease ms, largest number of open tasks, largest number of failures of a place,
-- seconds to live, retry ms, owner, whether it sees all. Leases places of the owner's tasks, then of tasks without an owner,
-- each in the order of submission. Places of open tasks are leased in any case, those of other tasks while fewer than the
-- largest number are open. Returns rows of the leased places.
local worker, now, ttl, leased = ARGV[1], now_ms(), ARGV[6], {}
reclaim_places(now, ARGV[5], ttl, ARGV[7])
local COLUMNS = {'task_id', 'session_id', 'attempt', 'payload'}

-- The session of the next attempt. It belongs to the task's owner from now on, so no one else can begin it. A name that
-- someone else has begun before is skipped.
local function next_session(task, place, owner)
  local attempt, session, state
  repeat
    attempt = redis.call('HINCRBY', task_key(task), 'attempts:' .. place, 1)
    session = task .. '.' .. place .. '.' .. attempt
    state = state_key(session)
  until redis.call('EXISTS', state) == 0
  redis.call('HSET', state, 'owner', owner, 'place', member(task, place))
  redis.call('EXPIRE', state, ttl)
  return attempt, session
end

local function lease_range(first, last)
  for _, name in ipairs(redis.call('ZRANGE', TASK_PENDING, first, last, 'BYSCORE', 'LIMIT', 0, 512)) do
    if #leased >= 4 * tonumber(ARGV[2]) then return end
    local task, place = string.match(name, '^(.+) (%d+)$')
    local key = task_key(task)
    local state, owner, payload = unpack(redis.call('HMGET', key, 'state', 'owner', 'payload'))
    local is_open = state == 'open'
    if is_open or redis.call('SCARD', TASK_OPEN) < tonumber(ARGV[4]) then
      if not is_open then begin_task(task, now) end
      local attempt, session = next_session(task, place, owner and owner ~= '' and owner or ARGV[8])
      redis.call('HSET', key, 'owner:' .. place, worker)
      redis.call('ZREM', TASK_PENDING, name)
      redis.call('ZADD', TASK_LEASES, now + ARGV[3], name)
      for _, value in ipairs({task, session, attempt, payload}) do leased[#leased + 1] = value end
    end
  end
end

if ARGV[9] == '1' then
  lease_range('-inf', 'inf')
else
  local own = counter('task_owner:' .. ARGV[8]) * OWNER_SPAN
  lease_range(own, own + OWNER_SPAN - 1)
  lease_range(0, OWNER_SPAN - 1)
end
return {COLUMNS, leased}
