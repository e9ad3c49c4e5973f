-- ARGV: evaluation id, owner, then payloads. Returns 1 if the evaluation is new; an existing one is left as it is.
local evaluation = EVALUATION .. ARGV[1]
if redis.call('EXISTS', evaluation) == 1 then return 0 end
check('HLEN', PROMPTS, EVAL_OF)
check('ZCARD', EVAL_PENDING)
check_stream(LEASE_SIGNALS)
numbers(COUNTERS, 'next_prompt_id')
redis.call('HSET', evaluation, 'num_prompts', #ARGV - 2, 'owner', ARGV[2], 'num_finished', 0, 'num_samples', 0, 'reward_sum', 0)
for i = 3, #ARGV do
  local id = redis.call('HINCRBY', COUNTERS, 'next_prompt_id', 1)
  redis.call('HSET', PROMPTS, id, ARGV[i])
  redis.call('HSET', EVAL_OF, id, ARGV[1])
  redis.call('ZADD', EVAL_PENDING, id, id)
end
signal_lease()
return 1
