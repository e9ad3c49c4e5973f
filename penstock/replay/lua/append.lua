-- Runs in one transaction after MSET of the payloads. ARGV: capacity bytes, order of take, then id, attempt, payload bytes
-- and min version of each group. Returns an outcome each. Begins every path that writes with a delete: see run_when_full.
local capacity, order = tonumber(ARGV[1]), ARGV[2]

-- In order of admission, a group that every ready one waits for has room even in a full queue: else none would move.
local function is_waited_for(id)
  if order ~= 'admission' or redis.call('ZRANGE', OPEN, 0, 0)[1] ~= id then return false end
  return tonumber(redis.call('ZRANGE', READY, 0, 0, 'WITHSCORES')[2]) > tonumber(redis.call('ZSCORE', OPEN, id))
end

local function append(id, attempt, bytes, min_version)
  local function refuse(outcome)
    redis.call('UNLINK', group_key(id, attempt))
    return outcome
  end
  local queued_attempt = group_meta(id)
  if queued_attempt == attempt then return 'duplicate' end
  if queued_attempt then return refuse('duplicate') end
  if redis.call('HEXISTS', PROMPTS, id) == 0 then
    return refuse(redis.call('GETBIT', TRAINED, id) == 1 and 'duplicate' or 'unknown')
  end
  local in_queue = counter('queued_bytes')
  if in_queue > 0 and in_queue + bytes > capacity and not is_waited_for(id) then return refuse('full') end
  local admission = settle_admission(id)
  redis.call('HSET', META, id, attempt .. ' ' .. bytes .. ' ' .. admission .. ' ' .. min_version)
  make_ready(id, bytes, admission, min_version)
  count('inserted', 1)
  return 'accepted'
end

local outcomes = {}
for i = 3, #ARGV, 4 do
  table.insert(outcomes, append(ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3]))
end
return outcomes
