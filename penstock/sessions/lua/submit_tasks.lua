-- ARGV: idempotency key (empty: none), its seconds to live, largest number of places that wait, then id, number of
-- sessions, deadline in ms (0: none), data source and payload of each task. Accepts all tasks or none. A task whose id
-- exists stays as it is. Returns full, or whether the key was known (0 or 1) and the ids.
local key = TASK_IDEMPOTENCY .. ARGV[1]
if ARGV[1] ~= '' then
  local known = redis.call('GET', key)
  if known then return {1, unpack(cjson.decode(known))} end
end
local ids, num_places = {}, redis.call('ZCARD', TASK_PENDING)
for i = 4, #ARGV, 5 do
  ids[#ids + 1] = ARGV[i]
  if redis.call('EXISTS', task_key(ARGV[i])) == 0 then num_places = num_places + ARGV[i + 1] end
end
if num_places > tonumber(ARGV[3]) then return 'full' end
for i = 4, #ARGV, 5 do
  local task = task_key(ARGV[i])
  if redis.call('EXISTS', task) == 0 then
    local order = redis.call('HINCRBY', COUNTERS, 'tasks_submitted', 1) * 4096
    redis.call('HSET', task, 'state', 'pending', 'order', order, 'num_sessions', ARGV[i + 1], 'deadline_ms', ARGV[i + 2],
      'data_source', ARGV[i + 3], 'payload', ARGV[i + 4], 'num_rewarded', 0, 'num_failed', 0)
    for place = 0, ARGV[i + 1] - 1 do redis.call('ZADD', TASK_PENDING, order + place, member(ARGV[i], place)) end
    count('task_places_submitted', ARGV[i + 1])
  end
end
if ARGV[1] ~= '' then redis.call('SET', key, cjson.encode(ids), 'EX', ARGV[2]) end
return {0, unpack(ids)}
