-- Runs in one transaction after SET of the payload. ARGV: id, attempt, payload bytes, min version, capacity bytes,
-- order of take. Begins every path that writes with a delete: see run_when_full.
local id, attempt, bytes = ARGV[1], ARGV[2], tonumber(ARGV[3])
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
-- In order of admission, a group that every ready one waits for has room even in a full queue: else none would move.
local function is_waited_for()
  if ARGV[6] ~= 'admission' or redis.call('ZRANGE', OPEN, 0, 0)[1] ~= id then return false end
  return tonumber(redis.call('ZRANGE', READY, 0, 0, 'WITHSCORES')[2]) > tonumber(redis.call('ZSCORE', OPEN, id))
end
local in_queue = counter('queued_bytes')
if in_queue > 0 and in_queue + bytes > tonumber(ARGV[5]) and not is_waited_for() then return refuse('full') end
local admission = settle_admission(id)
redis.call('HSET', META, id, attempt .. ' ' .. bytes .. ' ' .. admission .. ' ' .. ARGV[4])
make_ready(id, bytes, admission, ARGV[4])
count('inserted', 1)
return 'accepted'
