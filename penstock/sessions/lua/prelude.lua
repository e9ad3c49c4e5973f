-- Shared by the scripts of sessions and tasks. The keys are described in penstock/store/keys.py.

local function calls_key(session)
  return SESSION .. session .. ':calls'
end

local function state_key(session)
  return SESSION .. session .. ':state'
end

-- Whether the caller may use a record of this owner: the rule of Owner.may_use in penstock/store/ownership.py.
local function may_use(owner, caller, sees_all)
  return not owner or owner == '' or owner == caller or sees_all == '1'
end

local function may_use_session(session, caller, sees_all)
  return may_use(redis.call('HGET', state_key(session), 'owner'), caller, sees_all)
end

-- Functions named check_... fail if what they are named after would fail. Scripts call them before their first write.
local function check_forget_calls(sessions)
  if #sessions == 0 then return end
  check('ZCARD', SESSIONS)
  numbers(SESSION_SIZES, unpack(sessions))
  numbers(COUNTERS, 'session_bytes')
end

-- Forgets the calls of a session, and their bytes.
local function forget_calls(session)
  redis.call('UNLINK', calls_key(session))
  redis.call('ZREM', SESSIONS, session)
  local num_bytes = redis.call('HGET', SESSION_SIZES, session)
  if num_bytes then
    redis.call('HDEL', SESSION_SIZES, session)
    count('session_bytes', -num_bytes)
  end
end

-- At most so many of the sessions whose time has passed. Their lists have expired by themselves.
local function expired_sessions(now, most)
  local expired = redis.call('ZRANGE', SESSIONS, '-inf', now, 'BYSCORE', 'LIMIT', 0, most)
  check_forget_calls(expired)
  return expired
end

-- A session that has its reward is kept until its group is in the queue, however long that takes.
local function keep_rewarded(session)
  redis.call('PERSIST', calls_key(session))
  redis.call('PERSIST', state_key(session))
  redis.call('ZADD', SESSIONS, 'inf', session)
end

-- ── tasks ──
-- A task has `num_sessions` places, numbered from 0. A place is pending, leased, rewarded, failed or dropped. A session that
-- was leased with a place has the name TASK.PLACE.ATTEMPT, but what counts is the `place` in its state: anyone may choose a
-- name.

-- Pending places are sorted by owner, then by submission, so those of an owner are a range: no one's backlog hides another's.
-- Tasks without an owner are the range 0. Up to 2^32 tasks fit into a range. A double has 53 bits, so beyond 512 owners the
-- places of one task may come out of order, and beyond two million its tasks.
local OWNER_SPAN = 2 ^ 44

-- About how many places one call completes, with their tasks.
local MAX_COMPLETED = 1024

local function task_key(task)
  return TASK .. task
end

local function member(task, place)
  return task .. ' ' .. place
end

-- Task and place that a session was leased with, or nothing.
local function place_of(session)
  local leased = redis.call('HGET', state_key(session), 'place')
  if leased then return string.match(leased, '^(.+) (%d+)$') end
end

local function check_abandon(session)
  check('HLEN', state_key(session))
  check_forget_calls({session})
end

-- Ends a session that will not be part of a group: its calls are forgotten, and no further call is recorded.
local function abandon(session, ttl)
  forget_calls(session)
  redis.call('HSET', state_key(session), 'abandoned', 1, 'reward', '{"reward": 0, "parts": {}}', 'answer', '[]')
  redis.call('EXPIRE', state_key(session), ttl)
end

-- Abandons the sessions that were leased with a place, except one. A session that someone began under such a name before
-- is another's.
local function abandon_others(task, place, session, ttl)
  for attempt = 1, tonumber(redis.call('HGET', task_key(task), 'attempts:' .. place) or '0') do
    local other = task .. '.' .. place .. '.' .. attempt
    local leased_task, leased_place = place_of(other)
    if other ~= session and leased_task == task and leased_place == tostring(place) then abandon(other, ttl) end
  end
end

-- Fails if the sessions that were leased with a place could not be abandoned.
local function check_place(task, place)
  for attempt = 1, (numbers(task_key(task), 'attempts:' .. place)) do
    check_abandon(task .. '.' .. place .. '.' .. attempt)
  end
end

-- Fails if a task could not be begun, get a reward or get a place back. If `num_ending` more rewards or failures would end
-- it, also fails if it could not be completed. Only then are all of its places read, and their number is returned.
local function check_task(task, num_ending)
  local key = task_key(task)
  local num_sessions, num_rewarded, num_failed = numbers(key, 'num_sessions', 'num_rewarded', 'num_failed', 'deadline_ms')
  check_float(key, 'order')
  check('ZCARD', TASK_PENDING, TASK_LEASES, TASK_DUE, FINISHING)
  check('SCARD', TASK_OPEN)
  numbers(COUNTERS, 'task_places_rewarded', 'task_places_failed', 'task_places_dropped')
  numbers(COUNTERS, 'task_places_reclaimed', 'tasks_failed')
  if num_rewarded + num_failed + num_ending < num_sessions then return 0 end
  for place = 0, num_sessions - 1 do check_place(task, place) end
  return num_sessions
end

local function remove_place(task, place)
  local was_pending = redis.call('ZREM', TASK_PENDING, member(task, place))
  return was_pending + redis.call('ZREM', TASK_LEASES, member(task, place)) > 0
end

-- No session joins the task any more. With a rewarded session it waits to become a group, otherwise it has failed.
local function complete(task, now, ttl, retry_ms)
  local key = task_key(task)
  local num_sessions, num_rewarded = unpack(redis.call('HMGET', key, 'num_sessions', 'num_rewarded'))
  for place = 0, tonumber(num_sessions) - 1 do
    if remove_place(task, place) then count('task_places_dropped', 1) end
    local winner = redis.call('HGET', key, 'rewarded:' .. place)
    abandon_others(task, place, winner, ttl)
  end
  redis.call('SREM', TASK_OPEN, task)
  redis.call('ZREM', TASK_DUE, task)
  if num_rewarded == '0' then
    redis.call('HSET', key, 'state', 'failed')
    redis.call('EXPIRE', key, ttl)
    count('tasks_failed', 1)
  else
    redis.call('HSET', key, 'state', 'complete')
    redis.call('ZADD', FINISHING, now + retry_ms, 'task:' .. task)
  end
end

local function complete_if_ended(task, now, ttl, retry_ms)
  local wanted, rewarded, failed = unpack(redis.call('HMGET', task_key(task), 'num_sessions', 'num_rewarded', 'num_failed'))
  if tonumber(rewarded) + tonumber(failed) >= tonumber(wanted) then complete(task, now, ttl, retry_ms) end
end

-- Begins a task with its first lease or its first reward. Its deadline counts from then.
local function begin_task(task, now)
  local key = task_key(task)
  redis.call('HSET', key, 'state', 'open')
  redis.call('SADD', TASK_OPEN, task)
  local deadline_ms = tonumber(redis.call('HGET', key, 'deadline_ms'))
  if deadline_ms > 0 then redis.call('ZADD', TASK_DUE, now + deadline_ms, task) end
end

-- Ends a lease that brought no reward. A failure that is not empty counts; after `max_failures` the place has failed.
local function return_place(task, place, failure, max_failures, now, ttl, retry_ms)
  local key = task_key(task)
  redis.call('ZREM', TASK_LEASES, member(task, place))
  if failure ~= '' then redis.call('HSET', key, 'failure', failure) end
  if failure ~= '' and redis.call('HINCRBY', key, 'failures:' .. place, 1) >= tonumber(max_failures) then
    redis.call('HINCRBY', key, 'num_failed', 1)
    count('task_places_failed', 1)
    complete_if_ended(task, now, ttl, retry_ms)
    return
  end
  redis.call('ZADD', TASK_PENDING, redis.call('HGET', key, 'order') + place, member(task, place))
end

-- Places whose lease has run out, so few that one call does not stall the queue. Fails if they could not be returned.
local function expired_places(now)
  local expired, num_ending, num_read = {}, {}, 0
  for _, name in ipairs(redis.call('ZRANGE', TASK_LEASES, '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)) do
    if num_read >= MAX_COMPLETED then break end
    local task, place = string.match(name, '^(.+) (%d+)$')
    numbers(task_key(task), 'failures:' .. place)
    num_ending[task] = (num_ending[task] or 0) + 1
    num_read = num_read + check_task(task, num_ending[task])
    expired[#expired + 1] = name
  end
  return expired
end

-- Returns places to the queue whose lease has run out: their workers are assumed dead.
local function reclaim_places(expired, now, max_failures, ttl, retry_ms)
  for _, name in ipairs(expired) do
    local task, place = string.match(name, '^(.+) (%d+)$')
    return_place(task, place, 'lease_expired', max_failures, now, ttl, retry_ms)
  end
  if #expired > 0 then count('task_places_reclaimed', #expired) end
  return #expired
end

-- Task and place of a session that holds the lease of its place; nothing if it holds none.
local function leased_place_of(session)
  local task, place = place_of(session)
  if not task or not redis.call('ZSCORE', TASK_LEASES, member(task, place)) then return nil end
  local attempt = redis.call('HGET', task_key(task), 'attempts:' .. place)
  if session == task .. '.' .. place .. '.' .. attempt then return task, place end
end

-- ── what people are shown ──
local SUMMARY = {'session_id', 'reward', 'answer', 'task_id', 'num_calls', 'num_bytes', 'owner'}

-- Adds the values of a row. Missing ones are empty texts. An abandoned session has an answer and no reward.
local function add_summary(values, session)
  local fields = redis.call('HMGET', state_key(session), 'reward', 'answer', 'task', 'abandoned', 'owner')
  local reward, answer, task, abandoned, owner = unpack(fields)
  if abandoned then reward = '' end
  local num_bytes = tonumber(redis.call('HGET', SESSION_SIZES, session) or '0')
  local num_calls = redis.call('LLEN', calls_key(session))
  local row = {session, reward or '', answer or '', task or place_of(session) or '', num_calls, num_bytes, owner or ''}
  for _, value in ipairs(row) do values[#values + 1] = value end
end
