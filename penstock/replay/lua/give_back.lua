-- ARGV: server, id, attempt, failure (empty: none), max attempts, whether the failure is final (1), number of prompts
-- that the server still works on, then the breaker's failures, non-finite failures and probe ms, and whether saved tokens
-- are forgotten (1). Ends a lease; does nothing if the server lost it already. Returns 1 if the failure opened the
-- server's breaker.
run_when_full()
local id = ARGV[2]
if redis.call('HGET', OWNERS, id) ~= ARGV[1] .. '/' .. ARGV[3] then return 0 end
local is_held_out, evaluation_id = redis.call('ZSCORE', EVAL_LEASES, id), redis.call('HGET', EVAL_OF, id)
if is_held_out then check_evaluations({id}) else check_prompts({id}, ARGV[4]) end
local failure, max_attempts, verdict = ARGV[4], tonumber(ARGV[5]), 'counted'
if failure ~= '' and ARGV[6] == '0' then
  local limits = {
    failures = tonumber(ARGV[8]), non_finite_failures = tonumber(ARGV[9]), probe_ms = tonumber(ARGV[10]),
    max_attempts = max_attempts,
  }
  verdict = record_failure(ARGV[1], id, failure, tonumber(ARGV[7]), limits)
end
if verdict ~= 'counted' then failure = '' end
if ARGV[11] == '1' then drop_saved(id) end
if is_held_out then
  return_evaluation(id, failure, max_attempts)
  if verdict == 'abandoned' then abandon_evaluation(evaluation_id) end
else
  return_prompt(id, failure, max_attempts)
end
return verdict == 'opened' and 1 or 0
