-- ARGV: evaluation id, prompt id, number of samples, sum of rewards, min version, max version, rewards as text, data
-- source and answers as JSON, encoded group to keep (or nothing), bytes of groups to keep at most, seconds to keep them,
-- parts of the rewards as JSON, number of the evaluation's first prompts that are kept. A kept group has its prompt with
-- it. Counts a held-out prompt as finished. Returns 0, and changes nothing, if it was finished before. No group of a
-- team's evaluation is kept: the learner does not see its scores.
local evaluation, groups, id = EVALUATION .. ARGV[1], EVALUATION_GROUPS .. ARGV[1], ARGV[2]
local prompt = redis.call('HGET', PROMPTS, id)
if not prompt then return 0 end
local owner = redis.call('HGET', OWNERS, id)
local low, high, is_kept = unpack(redis.call('HMGET', evaluation, 'version_min', 'version_max', 'is_kept'))
local is_lowest = not low or tonumber(ARGV[5]) < tonumber(low)
local is_highest = not high or tonumber(ARGV[6]) > tonumber(high)
local first_id = numbers(evaluation, 'first_id', 'kept_bytes', 'num_omitted')
check('HLEN', groups)
check_evaluations({id})
local breakers = breakers_of({owner})

redis.call('HDEL', PROMPTS, id)
redis.call('ZREM', EVAL_LEASES, id)
redis.call('ZREM', EVAL_PENDING, id)
close_breakers(breakers)
redis.call('HDEL', OWNERS, id)
redis.call('HDEL', ATTEMPTS, id)
redis.call('HDEL', FAILURES, id)
redis.call('HDEL', REFUNDS, id)
redis.call('HDEL', EVAL_OF, id)
drop_saved(id)
redis.call('HINCRBY', evaluation, 'num_samples', ARGV[3])
redis.call('HINCRBYFLOAT', evaluation, 'reward_sum', ARGV[4])
if ARGV[9] ~= '' and is_kept ~= '0' and id - first_id < tonumber(ARGV[13]) then
  if redis.call('HINCRBY', evaluation, 'kept_bytes', #ARGV[9] + #prompt) <= tonumber(ARGV[10]) then
    redis.call('HSET', groups, id, ARGV[9], 'prompt:' .. id, prompt)
    redis.call('EXPIRE', groups, ARGV[11])
  else
    redis.call('HINCRBY', evaluation, 'num_omitted', 1)
  end
end
finish_evaluation_prompt(ARGV[1])
redis.call('HSET', evaluation, 'rewards:' .. id, ARGV[7], 'samples:' .. id, ARGV[8], 'parts:' .. id, ARGV[12])
if is_lowest then redis.call('HSET', evaluation, 'version_min', ARGV[5]) end
if is_highest then redis.call('HSET', evaluation, 'version_max', ARGV[6]) end
return 1
