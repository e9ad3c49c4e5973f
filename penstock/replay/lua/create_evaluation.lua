-- ARGV: evaluation id, owner, whether that sees all, digest of what is asked for (empty: none), then payloads. Only the
-- score of an owner that sees all is kept for everyone. Returns 1 if the evaluation is new. An existing one is left as it
-- is: returns 0, or -1 if both have a digest and they differ.
local evaluation = EVALUATION .. ARGV[1]
local num_prompts, digest = unpack(redis.call('HMGET', evaluation, 'num_prompts', 'digest'))
if num_prompts then return (digest or '') ~= '' and ARGV[4] ~= '' and digest ~= ARGV[4] and -1 or 0 end
check('HLEN', PROMPTS, EVAL_OF)
check('ZCARD', EVAL_PENDING)
check_stream(LEASE_SIGNALS)
local last_id = numbers(COUNTERS, 'next_prompt_id')
redis.call('HSET', evaluation, 'first_id', last_id + 1, 'num_prompts', #ARGV - 4, 'owner', ARGV[2], 'is_kept', ARGV[3], 'digest', ARGV[4],
  'num_finished', 0, 'num_samples', 0, 'reward_sum', 0)
for i = 5, #ARGV do
  local id = redis.call('HINCRBY', COUNTERS, 'next_prompt_id', 1)
  redis.call('HSET', PROMPTS, id, ARGV[i])
  redis.call('HSET', EVAL_OF, id, ARGV[1])
  redis.call('ZADD', EVAL_PENDING, id, id)
end
signal_lease()
return 1
