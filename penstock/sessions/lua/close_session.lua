-- ARGV: session, encoded reward, seconds to live, ms after which another gateway finishes what this one has not, task that
-- the session belongs to (empty: that of its lease, or none), owner, whether it sees all. The first reward closes the
-- session: no call is recorded after it, and a later reward changes nothing, whichever task it names. Returns one of
--   answered, the answer     its group is in the queue, or it will be part of none
--   closed, the reward       it becomes its own group
--   joined, the reward       it is part of a task that waits for further sessions
--   complete, the task       it was the last session of its task
--   missing                  it has no calls, or belongs to another owner
--   unknown                  there is no task of this name, or it belongs to another owner
local session, now, ttl, retry_ms, state = ARGV[1], now_ms(), ARGV[3], ARGV[4], state_key(ARGV[1])
local answer, reward, joined, owner = unpack(redis.call('HMGET', state, 'answer', 'reward', 'task', 'owner'))
if not may_use(owner, ARGV[6], ARGV[7]) then return {'missing', ''} end
if answer then return {'answered', answer} end
if reward and joined then
  local is_complete = redis.call('HGET', task_key(joined), 'state') == 'complete'
  return {is_complete and 'complete' or 'joined', is_complete and joined or reward}
end
if reward then return {'closed', reward} end
if redis.call('LLEN', calls_key(session)) == 0 then return {'missing', ''} end
local task, place = place_of(session)
if not task and ARGV[5] ~= '' then
  task = ARGV[5]
  local is_there = redis.call('EXISTS', task_key(task)) == 1
  if not is_there or not may_use(redis.call('HGET', task_key(task), 'owner'), ARGV[6], ARGV[7]) then return {'unknown', ''} end
end
check_abandon(session)
check('ZCARD', FINISHING)
if not task then
  redis.call('HSET', state, 'reward', ARGV[2])
  keep_rewarded(session)
  redis.call('ZADD', FINISHING, now + retry_ms, 'session:' .. session)
  return {'closed', ARGV[2]}
end

local key = task_key(task)
local task_state = redis.call('HGET', key, 'state')
local is_open = task_state == 'open' or task_state == 'pending'
-- A session that was not leased takes the first place that no worker has, or else the first that is leased.
if not place and is_open then
  for other = 0, numbers(key, 'num_sessions') - 1 do
    local name = member(task, other)
    if redis.call('ZSCORE', TASK_PENDING, name) then
      place = other
      break
    end
    if not place and redis.call('ZSCORE', TASK_LEASES, name) then place = other end
  end
end
local is_wanted = is_open and place and redis.call('HEXISTS', key, 'rewarded:' .. place) == 0
if is_wanted then
  check_place(task, place)
  check_task(task, 1)
end
if not is_wanted or not remove_place(task, place) then
  abandon(session, ttl)
  return {'answered', '[]'}
end
if task_state == 'pending' then begin_task(task, now) end
redis.call('HSET', state, 'reward', ARGV[2], 'task', task)
keep_rewarded(session)
redis.call('HSET', key, 'rewarded:' .. place, session)
redis.call('HINCRBY', key, 'num_rewarded', 1)
count('task_places_rewarded', 1)
abandon_others(task, place, session, ttl)
complete_if_ended(task, now, ttl, retry_ms)
if redis.call('HGET', key, 'state') == 'complete' then return {'complete', task} end
return {'joined', ARGV[2]}
