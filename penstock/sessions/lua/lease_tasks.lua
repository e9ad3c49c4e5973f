-- ARGV: worker, largest number of places, lease ms, largest number of open tasks, largest number of failures of a place,
-- seconds to live, retry ms, owner, whether it sees all. Leases places of the owner's tasks, then of tasks without an owner,
-- each in the order of submission. Places of open tasks are leased in any case, those of other tasks while fewer than the
-- largest number are open. Returns rows of the leased places.
local worker, now, ttl, leased = ARGV[1], now_ms(), ARGV[6], {}
local COLUMNS = {'task_id', 'session_id', 'attempt', 'payload'}
local own = numbers(COUNTERS, 'task_owner:' .. ARGV[8]) * OWNER_SPAN
local ranges = {{own, own + OWNER_SPAN - 1}, {0, OWNER_SPAN - 1}}
if ARGV[9] == '1' then ranges = {{'-inf', 'inf'}} end

-- The number and the session of the next attempt. A name that someone else has begun before is skipped.
local function next_session(task, place, attempt)
  local session
  repeat
    attempt = attempt + 1
    session = task .. '.' .. place .. '.' .. attempt
  until redis.call('HLEN', state_key(session)) == 0
  return attempt, session
end

-- Chooses places, and the tasks that begin with them. Fails if they could not be leased.
local function choose_places(max_places, max_open)
  local places, is_chosen, is_begun, begun, num_open = {}, {}, {}, {}, redis.call('SCARD', TASK_OPEN)
  for _, range in ipairs(ranges) do
    for _, name in ipairs(redis.call('ZRANGE', TASK_PENDING, range[1], range[2], 'BYSCORE', 'LIMIT', 0, 512)) do
      if #places >= max_places then break end
      local task, place = string.match(name, '^(.+) (%d+)$')
      local state, owner, payload = unpack(redis.call('HMGET', task_key(task), 'state', 'owner', 'payload'))
      local is_open = state == 'open' or is_begun[task]
      if not is_chosen[name] and (is_open or num_open + #begun < max_open) then
        if not is_open then begun[#begun + 1], is_begun[task] = task, true end
        local attempts = numbers(task_key(task), 'attempts:' .. place, 'deadline_ms')
        local attempt, session = next_session(task, place, attempts)
        is_chosen[name], places[#places + 1] = true, {
          task = task, place = place, owner = owner and owner ~= '' and owner or ARGV[8], payload = payload,
          attempt = attempt, session = session,
        }
      end
    end
  end
  check('ZCARD', TASK_DUE, TASK_LEASES)
  return places, begun
end

local expired = expired_places(now)
if #expired > 0 then
  choose_places(1024, math.huge)
  for _, name in ipairs(expired) do
    local task, place = string.match(name, '^(.+) (%d+)$')
    next_session(task, place, (numbers(task_key(task), 'attempts:' .. place)))
  end
  reclaim_places(expired, now, ARGV[5], ttl, ARGV[7])
end
local places, begun = choose_places(tonumber(ARGV[2]), tonumber(ARGV[4]))
for _, task in ipairs(begun) do begin_task(task, now) end
for _, chosen in ipairs(places) do
  local key, name, state = task_key(chosen.task), member(chosen.task, chosen.place), state_key(chosen.session)
  redis.call('HSET', key, 'attempts:' .. chosen.place, chosen.attempt, 'owner:' .. chosen.place, worker)
  -- The session belongs to the task's owner from now on, so no one else can begin it.
  redis.call('HSET', state, 'owner', chosen.owner, 'place', name)
  redis.call('EXPIRE', state, ttl)
  redis.call('ZREM', TASK_PENDING, name)
  redis.call('ZADD', TASK_LEASES, now + ARGV[3], name)
  for _, value in ipairs({chosen.task, chosen.session, chosen.attempt, chosen.payload}) do leased[#leased + 1] = value end
end
return {COLUMNS, leased}
