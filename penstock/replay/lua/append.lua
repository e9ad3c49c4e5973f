-- Runs in one transaction after SET of the payload. ARGV: id, attempt, payload bytes, min version,
-- capacity bytes.
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
local in_queue = counter('queued_bytes')
if in_queue > 0 and in_queue + bytes > tonumber(ARGV[5]) then return refuse('full') end
settle_admission(id)
local sequence = redis.call('HINCRBY', COUNTERS, 'sequence', 1)
redis.call('ZADD', READY, sequence, id)
redis.call('ZADD', FRESH, ARGV[4], id)
redis.call('HSET', META, id, attempt .. ' ' .. bytes)
count('queued_bytes', bytes)
return 'accepted'
