-- ARGV: prompt id. Returns {state, attempt, payload}; an unknown prompt has no state.
local id = ARGV[1]
if redis.call('GETBIT', TRAINED, id) == 1 then return {'trained', 0, ''} end
local payload = redis.call('HGET', PROMPTS, id)
if not payload then return redis.call('GETBIT', BURIED, id) == 1 and {'dead_lettered', 0, ''} or {} end
local state = 'pending'
if redis.call('HEXISTS', META, id) == 1 then
  state = 'queued'
elseif redis.call('ZSCORE', LEASES, id) or redis.call('ZSCORE', EVAL_LEASES, id) then
  state = 'leased'
end
return {state, tonumber(redis.call('HGET', ATTEMPTS, id) or '0'), payload}
