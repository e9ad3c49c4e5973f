-- ARGV: idempotency key (empty: none), its owner, the digest that it is bound to, its seconds to live, largest number of
-- places that wait, then id, number of sessions, deadline in ms (0: none), data source, payload and digest of each task.
-- Accepts all tasks or none. A task of the owner whose id exists stays as it is. Returns full, other (the key stands for
-- another digest), taken (another owner has a task of this id, or it is of another digest) and the id, or whether the key
-- was known (0 or 1) and the ids.
local key, owner, digest = TASK_IDEMPOTENCY .. ARGV[2] .. ':' .. ARGV[1], ARGV[2], ARGV[3]
if ARGV[1] ~= '' then
  local known = redis.call('GET', key)
  if known then
    known = cjson.decode(known)
    if known.digest ~= digest then return 'other' end
    return {1, known.ids}
  end
end
local ids, num_places = {}, redis.call('ZCARD', TASK_PENDING)
for i = 6, #ARGV, 6 do
  local known = redis.call('HMGET', task_key(ARGV[i]), 'owner', 'num_sessions', 'digest')
  ids[#ids + 1] = ARGV[i]
  if not known[2] then
    num_places = num_places + ARGV[i + 1]
  elseif not may_use(known[1], owner, '0') or known[3] and known[3] ~= ARGV[i + 5] then
    return {'taken', ARGV[i]}
  end
end
if num_places > tonumber(ARGV[5]) then return 'full' end
local number = numbers(COUNTERS, 'task_owner:' .. owner, 'task_owners', 'tasks_submitted', 'task_places_submitted')
if owner ~= '' and number == 0 then
  number = redis.call('HINCRBY', COUNTERS, 'task_owners', 1)
  redis.call('HSET', COUNTERS, 'task_owner:' .. owner, number)
end
for i = 6, #ARGV, 6 do
  local task = task_key(ARGV[i])
  if redis.call('EXISTS', task) == 0 then
    local order = number * OWNER_SPAN + redis.call('HINCRBY', COUNTERS, 'tasks_submitted', 1) * 4096
    redis.call('HSET', task, 'state', 'pending', 'order', order, 'num_sessions', ARGV[i + 1], 'deadline_ms', ARGV[i + 2],
      'data_source', ARGV[i + 3], 'payload', ARGV[i + 4], 'digest', ARGV[i + 5], 'num_rewarded', 0, 'num_failed', 0,
      'owner', owner)
    for place = 0, ARGV[i + 1] - 1 do redis.call('ZADD', TASK_PENDING, order + place, member(ARGV[i], place)) end
    count('task_places_submitted', ARGV[i + 1])
  end
end
if ARGV[1] ~= '' then redis.call('SET', key, cjson.encode({digest = digest, ids = ids}), 'EX', ARGV[4]) end
return {0, ids}
